"""Encoded images are reused: by all conversations of a model in memory, and through a folder by other programs."""

import os
import random
import shutil
import threading
import time
from functools import partial

import numpy as np
import pytest
from conversations import say
from limits import of_child
from threads import in_threads

import pykvedge
from pykvedge import CancelledError, Picture, Sampling, Session, UsageError
from pykvedge.caches.encoded import Encoded
from pykvedge.caches.folder import CacheFolder
from pykvedge.models.vision import ImagePiece, Vision
from pykvedge.system import memory

FEW = Sampling(max_tokens=6)
PLANS = {
    "full": pykvedge.plan("full"),
    "merged": pykvedge.plan("lookm", 0.4),
    "pruned": pykvedge.plan("h2o", 0.5, image_tokens=0.5),
}
LIMIT = 1 << 20


def picture(seed, side=56):
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def loaded(files, **settings):
    return pykvedge.load(files.model, files.mmproj, threads=1, **settings)


def shared(model):
    """Returns the encoder of a loaded model, and its cached images."""
    loan = model.lend()
    loan.give_back()
    return loan.encoder, loan.caches.images


def counted(model):
    """Counts the images that the encoder of a loaded model encodes from now on."""
    encoder, _ = shared(model)
    encode, calls = encoder.encode, []

    def count(chunk, n_tokens, look):
        calls.append(n_tokens)
        return encode(chunk, n_tokens, look)

    encoder.encode = count
    return calls


def ask(model, seeds, plan=PLANS["merged"], **settings):
    """Asks a question about pictures. No plan here stores prompts in a cache folder."""
    with Session(model, plan=plan, **settings) as session:
        return say(session, "What is this?", [picture(i) for i in seeds], FEW)


def never():
    raise AssertionError("it was there")


# ------------------------------------------------------------------------------------------------------------
# In memory


def test_the_bound_holds_and_those_used_least_recently_go_first():
    held = Encoded(4, 3 * 160)
    made = []

    def rows(key, n_rows=10):
        def make():
            made.append(key)
            return np.full((n_rows, 4), hash(key) % 97, np.float32)

        out, there = held.rows(key, n_rows, make, lambda share: None)
        assert out.shape == (n_rows, 4) and (out == hash(key) % 97).all() and there != (made[-1:] == [key])
        return there

    for key in "abc":
        rows(key)
        made.append("")
    assert rows("a") and not rows("d")
    made.append("")
    assert rows("a") and rows("c") and rows("d") and held.memory.n_bytes == 480
    assert not rows("b") and made.count("b") == 2
    held.memory.drop("b")
    held.memory.drop("nothing")
    assert held.memory.n_bytes == 320
    assert not rows("large", 31) and held.memory.n_bytes == 320  # it would have removed all other entries
    held.memory.clear()
    assert held.memory.n_bytes == 0 and not rows("a")
    with pytest.raises(ValueError):
        held.rows("a", 10, never, print)[0][0] = 1  # other sessions read it, too


def test_threads_that_want_the_same_image_encode_it_once():
    for limit in (LIMIT, 0):
        held, made, out = Encoded(4, limit), [], []
        begun = threading.Event()

        def make(made=made, begun=begun):
            begun.set()
            made.append(1)
            time.sleep(0.2)
            return np.ones((5, 4), np.float32)

        def want(held=held, make=make, out=out):
            out.append(held.rows("a", 5, make, lambda share: None))

        threads = [threading.Thread(target=want) for _ in range(4)]
        threads[0].start()
        assert begun.wait(60)
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1 and sorted(there for _, there in out) == [False, True, True, True]
        assert all((rows == 1).all() for rows, _ in out)


def test_who_waits_may_stop_and_goes_on_where_the_other_stopped():
    held, begun, end, out = Encoded(4, LIMIT), threading.Event(), threading.Event(), []

    def fails():
        begun.set()
        assert end.wait(60)
        raise CancelledError

    def first():
        with pytest.raises(CancelledError):
            held.rows("a", 5, fails, lambda share: None)

    def stop(share):
        raise KeyboardInterrupt

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(60)
    with pytest.raises(KeyboardInterrupt):
        held.rows("a", 5, never, stop)
    other = threading.Thread(
        target=lambda: out.append(held.rows("a", 5, lambda: np.ones((5, 4), np.float32), lambda share: None))
    )
    other.start()
    end.set()
    thread.join()
    other.join()
    assert not out[0][1] and held.rows("a", 5, never, never)[1]


@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
@pytest.mark.parametrize("name", PLANS)
def test_a_second_conversation_encodes_nothing_and_answers_alike(tiny, native, kind, name):
    plan = PLANS[name]
    with loaded(tiny(kind), image_cache=0) as without:
        calls = counted(without)
        expected = [ask(without, seeds, plan) for seeds in ([1, 2], [2, 1], [2, 3])]
        assert len(calls) == 6 and not any(report.tokens.images_reused for report in expected)
    with loaded(tiny(kind)) as model:
        calls = counted(model)
        for seeds, report, reused in zip(([1, 2], [2, 1], [2, 3]), expected, (0, 2, 1), strict=True):
            again = ask(model, seeds, plan)
            assert again.text == report.text and again.kv == report.kv
            assert again.tokens.images_reused == reused == again.as_json()["tokens"]["images_reused"]
            assert again.tokens.image == report.tokens.image and again.tokens.pruned == report.tokens.pruned
            assert (f"{reused} from the cache" in again.line()) == bool(reused)
        assert len(calls) == 3
        # and a plan that reads fewer tokens of the same image
        assert ask(model, [3], PLANS["pruned"]).tokens.images_reused == 1 and len(calls) == 3


def test_a_bounded_prompt_and_the_next_message_find_them(tiny, native):
    with loaded(tiny("llava")) as model, Session(model, plan=pykvedge.plan("h2o", 0.3), bounded=True) as session:
        assert say(session, "What is this?", [picture(1)], FEW).tokens.images_reused == 0
        assert say(session, "And now?", [picture(1)], FEW).tokens.images_reused == 1
        session.clear()
        assert say(session, "What is this?", [picture(1)], FEW).tokens.images_reused == 1


def test_a_stream_leaves_nothing_behind_but_finds_what_is_there(tiny, native):
    with loaded(tiny("llava")) as model:
        images, calls = shared(model)[1], counted(model)
        ask(model, [3])
        one = images.memory.n_bytes
        with Session(model, plan=pykvedge.plan("snapkv", 64, sinks=4), stream=True) as session:
            report = say(session, "What happens?", (picture(i) for i in range(6)), FEW)
        assert report.tokens.images_reused == 1 and len(calls) == 6
        assert images.memory.n_bytes == one and ask(model, [3]).tokens.images_reused == 1


def test_a_thousand_images_take_no_more_than_the_bound(tiny, native):
    limit = 2 << 20
    with loaded(tiny("llava"), image_cache=limit) as model:
        encoder, images = shared(model)
        vision = Vision(encoder, images)
        rss = []
        for i in range(1000):
            pieces = vision.split(vision.marker, [Picture("p", 4, 4, i.to_bytes(4, "big") * 12)])
            for piece in pieces:
                if isinstance(piece, ImagePiece):
                    vision.encode(piece)
                    assert not piece.reused
            vision.release(pieces)
            assert 0 < images.memory.n_bytes <= limit
            rss.append(memory.rss_bytes())
        assert images.memory.n_bytes > limit // 2
        assert 4 * limit < 1000 * 16 * 256 * 4  # all images together would take much more
        assert max(rss[200:]) - rss[200] < 2 * limit  # the rest of the process may grow a little


def test_a_closed_model_frees_them(tiny, native):
    with loaded(tiny("llava")) as model, Session(model, plan=PLANS["full"]) as session:
        images = shared(model)[1]
        say(session, "What is this?", [picture(1)], FEW)
        assert images.memory.n_bytes > 0
    assert images.memory.n_bytes == 0 and not model.in_memory


def test_settings_that_cannot_be(tiny, native):
    files = tiny("llava")
    wrong = [("image_cache", -1), ("image_cache", 1.5), ("cache_size", 0)]
    wrong += [("cache", path) for path in (7, "", "a\0")]
    for name, value in wrong:
        with pytest.raises(UsageError, match=name.split("_")[0]):
            pykvedge.Settings(**{name: value})
    with loaded(files) as model, pytest.raises(UsageError, match=r"pass image_cache to pykvedge\.load"):
        Session(model, image_cache=0)


# ------------------------------------------------------------------------------------------------------------
# In a folder


@pytest.fixture
def asked(tiny, native, tmp_path):
    """asked(kind, **settings) -> (report of a question to a newly loaded model, number of encoded images)."""

    def make(kind="llava", shape=None, **settings):
        with loaded(tiny(kind, **(shape or {})), **{"cache": tmp_path / "c", **settings}) as model:
            calls = counted(model)
            return ask(model, [1]), len(calls)

    return make


def test_another_program_finds_them(asked, tmp_path):
    for kind in ("llava", "qwen2vl"):
        expected, n = asked(kind, cache=None)
        assert (asked(kind)[0].text, asked(kind)[1], n) == (expected.text, 0, 1)
        again, n = asked(kind)
        assert again.text == expected.text and again.kv == expected.kv and n == 0 and again.tokens.images_reused == 1
    sizes = sorted(file.stat().st_size for file in (tmp_path / "c").iterdir())
    assert len(sizes) == 2 and 16 * 256 * 4 < sizes[1] < 16 * 256 * 4 + 200


def test_models_share_a_folder_and_not_their_images(asked, tmp_path):
    """Other weights of the encoder or of both models, and the same encoder with another width: no image is shared."""
    shapes = ({}, {"seed": 7}, {"image_size": 84}, {"head_size": 32})
    expected = [asked(shape=shape, cache=None)[0].text for shape in shapes]
    assert [asked(shape=shape)[1] for shape in shapes] == [1, 1, 1, 1]
    assert [asked(shape=shape)[1] for shape in shapes] == [0, 0, 0, 0]
    assert [asked(shape=shape)[0].text for shape in shapes] == expected
    assert len(list((tmp_path / "c").iterdir())) == 4


def test_another_version_of_kvedge_encodes_for_itself(asked, monkeypatch):
    """Another version may have a llama.cpp that prepares images differently."""
    assert [asked()[1], asked()[1]] == [1, 0]
    monkeypatch.setattr("pykvedge.runtime.loaded.package_version", lambda: "99.0")
    assert [asked()[1], asked()[1]] == [1, 0]


def test_a_damaged_entry_is_encoded_again(asked, tiny, tmp_path):
    """Changes bytes of all fields of the head and the name, and of the rows: the answer never changes."""
    expected = asked()[0].text
    (file,) = (tmp_path / "c").iterdir()
    whole, draw = file.read_bytes(), random.Random(5)
    n_head = 32 + len(file.stem)
    places = [*range(0, n_head, 3), *(draw.randrange(n_head, len(whole)) for _ in range(10))]
    with loaded(tiny("llava"), cache=tmp_path / "c", image_cache=0) as model:
        calls = counted(model)
        for at in places:
            file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << draw.randrange(8))]) + whole[at + 1 :])
            report = ask(model, [1])
            assert report.text == expected and report.tokens.images_reused == 0, at
            assert file.read_bytes() == whole, at
        file.write_bytes(whole[: len(whole) // 2])
        assert ask(model, [1]).text == expected and len(calls) == len(places) + 1
        assert ask(model, [1]).tokens.images_reused == 1


def test_rows_of_another_number_are_not_taken():
    class Wrong:
        def get(self, kind, key):
            return memoryview(bytes(4 * 4 * 9))

        def put(self, kind, key, parts):
            pass

    rows, there = Encoded(4, LIMIT, Wrong()).rows("a", 10, lambda: np.ones((10, 4), np.float32), never)
    assert not there and rows.shape == (10, 4)


def test_a_folder_that_cannot_be_used_is_told_of_once(tiny, kvedge, picture_file, tmp_path):
    (tmp_path / "file").write_text("mine")
    arguments = ["chat", *tiny("llava").arguments(), "--method", "lookm", "--image", picture_file(), "--max-tokens", 3]
    expected = kvedge(*arguments, "What?")
    done = kvedge(*arguments, "--cache", tmp_path / "file", "What?")
    assert (done.code, done.out) == (0, expected.out) and (tmp_path / "file").read_text() == "mine"
    lines = [line for line in done.err.splitlines() if "cache folder" in line]
    assert len(lines) == 1 and lines[0].startswith("kvedge: ") and "nothing is cached" in lines[0]
    assert "cache folder" not in kvedge(*arguments, "--cache", tmp_path / "file", "--quiet", "What?").err
    object_ = kvedge(*arguments, "--cache", tmp_path / "file", "--json", "What?").json
    assert len(object_["notes"]) == 1 and object_["tokens"]["images_reused"] == 0
    assert "notes" not in kvedge(*arguments, "--cache", tmp_path / "c", "--json", "What?").json


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_a_disk_that_is_full_costs_no_answer(tiny, kvedge, picture_file, tmp_path):
    arguments = ["chat", *tiny("llava").arguments(), "--method", "lookm", "--image", picture_file(), "--max-tokens", 3]
    done = kvedge(*arguments, "--cache", tmp_path / "c", "What?", preexec_fn=of_child(5000))
    assert (done.code, done.out) == (0, kvedge(*arguments, "What?").out)
    assert sum("cache folder" in line for line in done.err.splitlines()) == 1 and not list((tmp_path / "c").iterdir())


def test_programs_at_the_same_time_share_a_folder(tiny, kvedge, picture_file, tmp_path):
    arguments = ["chat", *tiny("llava").arguments(), "--method", "lookm", "--max-tokens", 3, "--json", "What?"]
    images = [picture_file("a.png", 40 + 4 * i, 60) for i in range(2)]
    with tiny("llava").session(pykvedge.plan("lookm")) as session:
        expected = {}
        for image in images:
            expected[str(image)] = say(session, "What?", [image], Sampling(max_tokens=3)).text
            session.clear()
    said = []

    def work(mine):
        for image in mine:
            done = kvedge(*arguments, "--image", image, "--cache", tmp_path / "c", "--cache-size", "30KB").json
            said.append((str(image), done["text"], done.get("notes")))

    in_threads(*(partial(work, images[i:] + images[:i]) for i in range(2)))
    assert sorted(said) == sorted((image, text, None) for image, text in expected.items() for _ in range(2))
    assert 0 < CacheFolder(tmp_path / "c", 30000).total_bytes() <= 30000
    assert len(list((tmp_path / "c").iterdir())) == 1  # an entry takes 16 KiB, so one was removed


def test_the_options_of_a_folder(kvedge, tiny, tmp_path):
    from pykvedge.cli.options import size

    for text in ("0", "4 GiBs", "-1", "", "4,5GiB", "0.0001K"):
        with pytest.raises(UsageError, match="--cache-size takes a number of bytes"):
            size("--cache-size", text)
    arguments = ["chat", *tiny("llama").arguments()]
    kvedge(*arguments, "--cache", tmp_path / "c", "--cache-size", "many", "Hi").failed(2, "--cache-size", "4GiB")
    kvedge(*arguments, "--cache-size", "4GiB", "Hi").failed(2, "--cache-size", "--cache")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("1", 1), ("500MiB", 500 << 20), ("1.5 GiB", 3 << 29), ("4GB", 4 * 10**9), ("2k", 2000), ("1tib", 1 << 40)],
)
def test_sizes_are_read(text, n_bytes):
    from pykvedge.cli.options import size

    assert size("--cache-size", text) == n_bytes


def test_a_conversation_goes_on_when_its_folder_goes_away(tiny, native, tmp_path):
    with loaded(tiny("llava"), cache=tmp_path / "c", image_cache=0) as model:
        expected = ask(model, [1]).text
        shutil.rmtree(tmp_path / "c")
        report = ask(model, [1])
        assert report.text == expected and report.tokens.images_reused == 0 and len(report.notes) == 1
        assert ask(model, [1]).notes == []
