"""Openings: a conversation continues from the beginning of another one, with the answers that it has without."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from choosing import crossed, whole
from forking import Warm

import pykvedge
from pykvedge.errors import StateError, UsageError
from pykvedge.models.vision import ImagePiece, TextPiece
from pykvedge.runtime import opening
from pykvedge.runtime.report import Tokens
from pykvedge.runtime.snapshot import Snapshot

QUESTIONS = ["What is this?", "How many of them are there, and which one is first?", "Why?"]
ASK = pykvedge.Sampling(max_tokens=12)
DOCUMENT = "It was a long day, and the river went on below the hill. " * 8


def files(tiny):
    return tiny("llava").model, tiny("llava").mmproj


def answers(session, pictures, questions=QUESTIONS):
    """Returns the answers to all questions. Each question opens a new conversation."""
    out = []
    for question in questions:
        session.clear()
        answer = session.ask(question, pictures, ASK)
        answer.read()
        out.append((answer.report.text, session.engine.cache.lengths(), answer.report.tokens))
    return out


def without_counts(found):
    return [(text, lengths, tokens.prompt, tokens.image, tokens.pruned) for text, lengths, tokens in found]


@pytest.mark.parametrize(
    ("asked", "method"),
    crossed(
        [("llava", 0), ("llava", 1), ("qwen2vl", 3), ("gemma3", 0)],
        ["full", "knorm", "lookm", "h2o", "elastic", "prefixkv"], ["h2o"], [("llava", 1)],
    ),
)  # fmt: skip
def test_what_is_said_is_the_same(native, tiny, picture_file, asked, method):
    """Three questions with answers of twelve tokens: read from the beginning, or from the opening except the first."""
    plan, (kind, n_images) = pykvedge.plan(method, None if method == "full" else 0.4), asked
    pictures = [picture_file(f"{i}.png", 60 + 8 * i, 60) for i in range(n_images)]
    settings = {"question_blind": True, "system": DOCUMENT, "n_ctx": 4096}
    with tiny(kind).session(plan, **settings) as session:
        apart = answers(session, pictures)
    with tiny(kind).session(plan, prompt_cache=2**28, **settings) as session:
        again = answers(session, pictures)
    assert without_counts(apart) == without_counts(again)
    assert all(tokens.reused == 0 for _, _, tokens in apart) and again[0][2].reused == 0
    assert all(0.5 * tokens.prompt < tokens.reused < tokens.prompt for _, _, tokens in again[1:])


@pytest.mark.parametrize("kind", ["qwen2vl", *whole("llava", "llama")])
def test_without_compression_nothing_has_to_be_asked_for(native, tiny, picture_file, kind):
    """A full cache does not depend on openings: answers equal those of a session without a cache."""
    pictures = [] if kind == "llama" else [picture_file()]
    said = []
    for room in (0, 2**28):
        with tiny(kind).session(pykvedge.plan("full"), prompt_cache=room, system=DOCUMENT) as session:
            said.append(answers(session, pictures))
    assert [text for text, _, _ in said[0]] == [text for text, _, _ in said[1]]
    assert said[1][1][2].reused > 0


@pytest.mark.parametrize("extra", [{"bounded": True}, {"kv_type": "q8_0"}, {"kv_type": "q4_0"}])
def test_with_other_settings(native, tiny, picture_file, extra):
    plan = pykvedge.plan("knorm", 0.3, image_tokens=0.5)
    said = []
    for room in (0, 2**28):
        with tiny("llava").session(plan, question_blind=True, prompt_cache=room, **extra) as session:
            said.append(answers(session, [picture_file(), picture_file("b.png", 50, 90)]))
    assert without_counts(said[0]) == without_counts(said[1])
    assert said[1][1][2].reused > 0


def test_what_is_kept_of_an_image_does_not_depend_on_the_question(native, tiny, picture_file):
    """SnapKV uses the last tokens of the prompt: with the question among them, the kept rows depend on the question."""
    kept = {}
    for blind in (True, False):
        settings = {"question_blind": blind, "prompt_cache": 2**26}
        with tiny("llava").session(pykvedge.plan("snapkv", 0.2), **settings) as session:
            for question in QUESTIONS:
                session.clear()
                answer = session.ask(question, [picture_file()], ASK)
                answer.close()
                cache = session.engine.cache
                heads = [cache.tokens(i, h) for i, row in enumerate(cache.lengths()) for h in range(len(row))]
                kept.setdefault(blind, []).append((heads, answer.report.tokens.reused))
    n = kept[True][1][1]  # tokens up to the end of the image
    rows = {blind: [[[t for t in row if t < n] for row in heads] for heads, _ in all_] for blind, all_ in kept.items()}
    assert n > 20 and rows[True][0] == rows[True][1] == rows[True][2]
    assert rows[False][0] != rows[False][1]


def test_other_pictures_plans_and_texts_are_read(native, tiny, picture_file):
    with pykvedge.load(*files(tiny), prompt_cache=2**28) as model:

        def reused(question, picture, plan=None, **settings):
            plan = plan or pykvedge.plan("knorm", 0.3)
            with pykvedge.Session(model, plan=plan, question_blind=True, **settings) as s:
                answer = s.ask(question, [picture], ASK)
                answer.read()
                return answer.report.tokens.reused

        a, b = picture_file("a.png", 60, 60), picture_file("b.png", 64, 60)
        assert reused("What?", a) == 0 < reused("Who?", a)
        assert reused("What?", b) == 0
        assert reused("What?", a, pykvedge.plan("knorm", 0.4)) == 0
        assert reused("What?", a, pykvedge.plan("knorm", 0.3, image_tokens=0.5)) == 0
        assert reused("What?", a, system="Be brief.") == 0
        assert reused("What?", a, kv_type="q8_0") == 0
        assert reused("What?", a, bounded=True) == 0
        assert reused("What?", a) > 0


def test_memory_for_openings_is_bounded(native, tiny, picture_file):
    with pykvedge.load(*files(tiny), prompt_cache=2**17) as model:
        for i in range(12):
            with pykvedge.Session(model, plan=pykvedge.plan("knorm", 0.3), question_blind=True) as session:
                session.ask("What?", [picture_file(f"{i}.png", 40 + i, 40)], ASK).read()
                openings = session._openings
                assert openings.memory.n_bytes <= 2**17
        assert openings.memory.n_bytes > 2**15


def test_a_follow_up_with_a_picture_is_cut_too(native, tiny, picture_file):
    """A follow-up takes no rows from a cache, but its picture's rows are chosen without the text."""
    held = []
    for question in ("And this?", "Or that one over there?"):
        with tiny("llava").session(pykvedge.plan("snapkv", 0.2), question_blind=True, prompt_cache=2**26) as session:
            session.ask("What?", [picture_file("a.png", 60, 60)], pykvedge.Sampling(max_tokens=1)).read()
            answer = session.ask(question, [picture_file("b.png", 70, 60)], pykvedge.Sampling(max_tokens=1))
            answer.read()
            assert answer.report.tokens.reused == 0
            cache, n = session.engine.cache, answer.report.tokens.image
            held.append([t for t in cache.tokens(0, 0) if t < 2 * n])
    assert held[0] == held[1] and held[0]


def test_forks_go_on_apart(native, tiny, picture_file):
    for kind, pictures in (("llava", [picture_file()]), ("gemma3", [])):
        with tiny(kind).session(pykvedge.plan("h2o", 0.4)) as session:
            with pytest.raises(StateError, match="no conversation"):
                session.fork()
            session.ask("What is this?", pictures, ASK).read()
            with session.fork() as one, session.fork(pykvedge.plan("knorm", 0.5)) as two:
                said = [s.ask("And why?", (), ASK).read() for s in (one, session)]
                assert said[0] == said[1]
                assert one.engine.cache.lengths() == session.engine.cache.lengths()
                two.ask("Who?", (), ASK).read()
                assert [len(s.messages) for s in (session, one, two)] == [4, 4, 4]
                assert session.messages[-2].text == "And why?" and two.messages[-2].text == "Who?"
                with one.fork() as three:
                    assert three.ask("Go on.", (), ASK).read() == session.ask("Go on.", (), ASK).read()


@pytest.mark.parametrize("kind", ["qwen2vl", *whole("llava", "llama")])
def test_a_conversation_from_a_file_forks_and_goes_on_as_the_one_that_was_saved(
    native, tiny, picture_file, tmp_path, kind
):
    pictures = [] if kind == "llama" else [picture_file(), picture_file("b.png", 70, 60)]
    with tiny(kind).session(pykvedge.plan("knorm", 0.4), question_blind=True, prompt_cache=2**26) as session:
        first = session.ask("What is this?", pictures, ASK).read()
        session.save(tmp_path / "talk.kv")
        said = [session.ask(question, (), ASK).read() for question in ("And why?", "Go on.")]
    with tiny(kind).session(pykvedge.plan("knorm", 0.4), question_blind=True, prompt_cache=2**26) as session:
        session.load(tmp_path / "talk.kv")
        with session.fork() as one:
            assert [one.ask(question, (), ASK).read() for question in ("And why?", "Go on.")] == said
            with one.fork() as two:
                assert two.messages == one.messages
        assert session.ask("And why?", (), ASK).read() == said[0]
        session.clear()  # and a new reading equals the first one
        assert session.ask("What is this?", pictures, ASK).read() == first
        session.clear()
        again = session.ask("What is this?", pictures, ASK)
        assert again.read() == first and (again.report.tokens.reused > 0 or not pictures)


def test_a_fork_outlives_its_session(native, tiny, picture_file):
    session = tiny("llava").session(pykvedge.plan("knorm", 0.4))
    session.ask("What is this?", [picture_file()], ASK).read()
    fork = session.fork()
    session.close()
    assert fork.ask("And?", (), ASK).read()
    fork.close()


def test_where_a_prompt_is_cut():
    image = ImagePiece(None, 9, "x/0", 9)
    text = TextPiece([1, 2])
    assert opening.cut([text, image, image, text]) == ([text, image, image], [text])
    assert opening.cut([text, image]) == ([], [text, image])
    assert opening.cut([text]) == ([], [text])
    long = list(range(100))
    assert opening.cut([TextPiece([*long, 7])], [[*long, 8], [*long, 9, 9]]) == ([TextPiece(long)], [TextPiece([7])])
    assert opening.cut([TextPiece([*long, 7])], [[*long[:50], 8]])[0] == []  # too short to be useful


def test_openings_are_written_and_read():
    kept = Snapshot(b"rows", 7, 9, 0, 9, 2.5, pending=(3,), answer=(1, 2), tokens=Tokens(9, 4, pruned=1))
    data = b"".join(kept.encode())
    assert Snapshot.decode(data) == kept
    for bad in (b"", data[:3], data[:20], data.replace(b'"n_past": 7', b'"n_past":-7'), data.replace(b"held", b"hold")):
        with pytest.raises(ValueError):
            Snapshot.decode(bad)


@pytest.mark.parametrize("size", [-1, 1.5, "many"])
def test_sizes_that_are_none(size):
    with pytest.raises(UsageError, match="prompt_cache"):
        pykvedge.runtime.settings.Settings(prompt_cache=size)


def test_as_an_option(native, tiny, picture_file, kvedge):
    """snapkv chooses rows by the question, except with --question-blind. It answers in both cases."""
    arguments = (*tiny("llava").arguments(), "--image", picture_file(), "--method", "snapkv", "--max-tokens", 3)
    plain = kvedge("chat", *arguments, "--json", "What?").json
    blind = kvedge("chat", *arguments, "--json", "--question-blind", "What?").json
    assert plain["tokens"]["prompt"] == blind["tokens"]["prompt"] and blind["tokens"]["reused"] == 0


@pytest.fixture
def chat(kvedge, tiny, picture_file, tmp_path):
    """Asks a question about the same picture, in a separate process with a cache folder."""

    def ask(question, *more, method="knorm"):
        files = (*tiny("llava").arguments(), "--image", picture_file(), "--cache", tmp_path / "cache")
        how = ("--method", method, "--max-tokens", 8, "--question-blind", "--json", *more)
        done = kvedge("chat", *files, *how, question)
        assert done.code == 0, done
        return done.json

    return ask


def openings_in(tmp_path):
    return list((tmp_path / "cache").glob("openings-*.kvc"))


def test_other_runs_go_on_from_it(chat, tmp_path):
    first = chat("What is this?")
    again, other = chat("What is this?"), chat("Why?", method="lookm")
    assert first["tokens"]["reused"] == 0 < again["tokens"]["reused"] and other["tokens"]["reused"] == 0
    assert first["text"] == again["text"] and first["kv"]["kept_per_layer"] == again["kv"]["kept_per_layer"]
    assert again["tokens"]["image"] == first["tokens"]["image"] > again["tokens"]["images_reused"]
    assert len(openings_in(tmp_path)) == 2


def test_a_damaged_opening_is_read_anew(chat, tmp_path):
    first = chat("What is this?")
    [file] = openings_in(tmp_path)
    data = file.read_bytes()
    for bad in (data[:-5], data[: len(data) // 2] + b"?" + data[len(data) // 2 + 1 :], b"", data + b"x"):
        file.write_bytes(bad)
        again = chat("What is this?")
        assert again["text"] == first["text"] and again["tokens"]["reused"] == 0
    assert chat("What is this?")["tokens"]["reused"] > 0


def test_rows_that_do_not_fit_the_model_are_read_anew(native, tiny, picture_file, tmp_path):
    """The folder is valid, but the entry has rows of another cache: it is refused, and the prompt is read normally."""
    said = []
    with tiny("llava").session(pykvedge.plan("knorm", 0.4), question_blind=True, prompt_cache=2**26) as session:
        said.append(answers(session, [picture_file()])[0])
        openings = session._openings
        [name] = openings.memory._things
        kept = openings.memory.get(name)
        for rows in (kept.rows[:-8], b"", kept.rows[:40] + bytes(8) + kept.rows[48:]):
            openings.memory.put(name, replace(kept, rows=rows))
            said.append(answers(session, [picture_file()])[0])
    assert all(text == said[0][0] and tokens.reused == 0 for text, _, tokens in said)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_killed_runs_leave_nothing_wrong(chat, environment, tiny, picture_file, tmp_path):
    """Killed during encoding, reading, writing or answering: the next run gives the right answer."""
    program = [sys.executable, "-m", "pykvedge", "chat", *tiny("llava").arguments(), "--image", str(picture_file())]
    program += ["--method", "knorm", "--question-blind", "--cache", str(tmp_path / "cache"), "What is this?"]
    for i in (0, 2, 5):
        process = Warm(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        time.sleep(0.1 + 0.2 * i)
        process.kill()
        process.wait()
    after = chat("What is this?")
    again = chat("What is this?")
    assert again["tokens"]["reused"] > 0 and after["text"] == again["text"]
    assert after["kv"]["kept_per_layer"] == again["kv"]["kept_per_layer"]
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_folder_that_cannot_be_used(kvedge, tiny, picture_file, tmp_path):
    (tmp_path / "file").write_text("no folder")
    done = kvedge("chat", *tiny("llava").arguments(), "--image", picture_file(), "--question-blind", "--max-tokens", 3,
                  "--cache", tmp_path / "file", "What?")  # fmt: skip
    assert done.code == 0 and done.out.strip() and "file" in done.err
