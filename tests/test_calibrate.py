"""kvedge calibrate: the tokens inside a box, the answer tokens that belong to a box, and runs on the demo model."""

import itertools
import json
import threading

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import DEMO

import pykvedge
from kvedge_lab.calibrate.heads import HeadScorer, retrieval_credit, score_heads, visual_credit
from kvedge_lab.calibrate.places import boxes_of_tokens, tokens_in_grid, tokens_of_needle
from kvedge_lab.calibrate.prefix import kept_shares
from kvedge_lab.calibrate.samples import TASKS, Box, Labelled, read_jsonl, scenes
from kvedge_lab.commands.calibrate import calibrate
from kvedge_lab.demo_tasks.evalset import samples as held_out
from pykvedge import CancelledError, KvedgeError, Picture, UnsupportedError, UsageError, load_picture
from pykvedge.models import profiles
from pykvedge.models.imagetokens import Places, places
from pykvedge.models.vision import ImagePiece, TextPiece
from pykvedge.plans import profile

FULL = pykvedge.plan("full")


@pytest.fixture(scope="module")
def demo(native):
    with DEMO.session() as session:
        yield session


# Boxes to tokens


def test_every_cell_of_a_scene_is_a_token():
    for row, col in itertools.product(range(12), range(12)):
        pixels = (col * 20, row * 20, col * 20 + 20, row * 20 + 20)
        assert tokens_in_grid(pixels, (240, 240), (12, 12)).tolist() == [row * 12 + col]
        twice = tuple(2 * x for x in pixels)
        assert tokens_in_grid(twice, (480, 480), (12, 12)).tolist() == [row * 12 + col]


@pytest.mark.parametrize(("pixels", "size", "grid", "expected"), [
    ((0, 0, 336, 336), (336, 336), (24, 24), list(range(576))),
    ((0, 0, 200, 100), (200, 100), (4, 4), list(range(4, 12))),  # a wide image is in the middle of its square
    ((0, 0, 50, 50), (200, 100), (4, 4), [4]),
    ((150, 50, 200, 100), (200, 100), (4, 4), [11]),
    ((0, 0, 100, 50), (100, 200), (4, 4), [1, 2]),  # and a tall one
    ((25, 0, 75, 100), (200, 100), (4, 2), [0, 1, 4, 5]),  # half of each patch
    ((12, 12, 14, 14), (40, 40), (4, 4), [5]),  # smaller than a patch
    ((9, 9, 11, 11), (40, 40), (4, 4), [0, 1, 4, 5]),  # on a corner of four
    ((0, 0, 12, 10), (40, 40), (4, 4), [0]),  # a fifth of the next patch is not enough
])  # fmt: skip
def test_boxes_cover_the_tokens_that_show_them(pixels, size, grid, expected):
    assert tokens_in_grid(pixels, size, grid).tolist() == expected


def test_grids_of_image_encoders(tiny, picture_file, native):
    wide = load_picture(picture_file("wide.png", 240, 120))
    with tiny("llava").session() as session:
        [piece] = [p for p in session.first_prompt("What?", [wide]) if isinstance(p, ImagePiece)]
        assert piece.places == Places(4, 4, padded=True) and piece.n_tokens == 16
    with tiny("qwen2vl").session() as session:
        [piece] = [p for p in session.first_prompt("What?", [wide]) if isinstance(p, ImagePiece)]
        at = piece.places
        assert at.across * at.down == piece.n_tokens and at.across > at.down and not at.padded


def test_grids_that_are_not_known_are_not_guessed():
    assert places("gemma3", (256, 1), 256) == Places(16, 16, padded=True)
    assert places("resampler", (64, 1), 64) is None  # 64 queries, which have no places
    assert places("mlp", (577, 1), 577) is None
    assert places("qwen2vl_merger", (6, 3), 18) == Places(6, 3, padded=False)
    assert places("pixtral", (6, 3), 20) is None  # a token at the end of each row


def test_what_has_no_known_places_is_refused(demo):
    picture = Picture("a", 240, 240, bytes(3 * 240 * 240))
    sample = Labelled("What is the code?", (picture,), (Box(0, (0, 0, 20, 20), "a"),))
    from kvedge_lab.calibrate.places import tokens_of_boxes

    with pytest.raises(UnsupportedError, match="the place of an image token"):
        tokens_of_boxes(sample, [ImagePiece(None, 144, "a/0", 144)])
    sliced = [ImagePiece(None, 144, f"a/{i}", 144, places=Places(12, 12, True)) for i in range(2)]
    with pytest.raises(UnsupportedError, match="slices"):
        tokens_of_boxes(sample, sliced)
    image = ImagePiece(None, 144, "a/0", 144, places=Places(12, 12, True))
    found = tokens_of_boxes(sample, [TextPiece([1, 2, 3]), image])
    assert [t.tolist() for t in found] == [[3]]


def test_needles_are_found_in_the_text_that_the_model_reads(demo):
    pieces = demo.first_prompt("The code is 7KE4. What is the code?")
    at = tokens_of_needle("7KE4", pieces, demo.model)
    text = b"".join(demo.model.piece(pieces[0].tokens[i]) for i in at)
    assert b"7KE4" in text and len(text) <= 5
    with pytest.raises(UsageError, match="does not occur exactly once"):
        tokens_of_needle("code", pieces, demo.model)


# Answers to boxes


def owners(generated, boxes, answer=""):
    return boxes_of_tokens([t.encode() for t in generated], Labelled("?", (), tuple(boxes), answer=answer))


def box(text, span=None):
    return Box(0, (0, 0, 1, 1), text, span)


def test_tokens_belong_to_the_box_whose_text_they_are_part_of():
    sign, price = box("Open until 5"), box("12 EUR")
    pieces = [" It", " says", " Op", "en", " until", " 5", ",", " for", " 12", " EUR", "."]
    assert owners(pieces, [sign, price]) == [None, None, 0, 0, 0, 0, None, None, 1, 1, None]


def test_what_could_be_of_two_boxes_is_of_none():
    assert owners([" red", " star"], [box("red star"), box("red star")]) == [None, None]
    assert owners([" red", " star"], [box("red star"), box("star")]) == [0, None]


def test_a_part_of_a_longer_word_is_no_occurrence():
    assert owners([" st", "art", " art"], [box("art")]) == [None, None, 0]


def test_spans_tell_equal_texts_apart_wherever_the_answer_stands():
    code = [box("K", (0, 1)), box("7", (1, 2)), box("K", (2, 3))]
    assert owners([" ", "K", "7", "K"], code, "K7K") == [None, 0, 1, 2]
    assert owners([" The", " code", " is", " K", "7", "K", "."], code, "K7K") == [None, None, None, 0, 1, 2, None]
    assert owners(["X", "7", "K"], code, "K7K") == [None, None, None]  # a wrong answer has no owners


def test_credit():
    attention = np.zeros((1, 2, 6), dtype=np.float32)
    attention[0, 0] = [0.1, 0.0, 0.5, 0.3, 0.05, 0.05]
    attention[0, 1] = [0.6, 0.0, 0.2, 0.1, 0.05, 0.05]
    source = np.array([2, 3])
    np.testing.assert_allclose(visual_credit(attention, source), [[0.5, 0]])
    np.testing.assert_allclose(retrieval_credit(attention, source), [[0.8, 0.2]], rtol=1e-6)


# Samples


@pytest.mark.parametrize("kind", ["visual-heads", "retrieval-heads"])
def test_scenes_label_what_their_answers_say(kind):
    for sample in itertools.islice(scenes(kind), 4 * len(TASKS[kind])):
        assert sample.boxes and sample.answer
        for b in sample.boxes:
            assert sample.answer[slice(*b.span)] == b.text
            left, top, right, bottom = b.pixels
            assert right - left == bottom - top == 20 and 0 <= left < right <= 240 and 0 <= top < bottom <= 240
            pixels = np.frombuffer(sample.pictures[b.image].rgb, np.uint8).reshape(240, 240, 3)
            assert np.ptp(pixels[top:bottom, left:right]) > 60  # the box has a drawing
        if kind == "visual-heads":
            assert len({b.pixels for b in sample.boxes}) == len(sample.boxes)


def test_samples_of_the_users_own(tmp_path, picture_file):
    picture = picture_file("a.png", 100, 60)
    line = {"image": str(picture), "question": "What?", "answer": "a cat", "boxes": [{"box": [0, 0, 50, 60]}]}
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(line) + "\n\n" + json.dumps({"question": "The key is 5. What is it?", "needle": "5"}))
    first, second = read_jsonl(path)
    assert first.boxes == (Box(0, (0, 0, 50, 60), "a cat"),) and first.pictures[0].width == 100
    assert second.needle == "5" and second.pictures == ()
    line = {"question": "And now?", "earlier": [{"question": "What?", "answer": "a cat"}]}
    path.write_text(json.dumps(line))
    [later] = read_jsonl(path)
    assert later.earlier == (("What?", "a cat"),)
    run = CliRunner().invoke(calibrate, ["heads", "--data", str(path)])
    assert isinstance(run.exception, UsageError) and "only kvedge calibrate budgets allows" in str(run.exception)


@pytest.mark.parametrize(("line", "says"), [
    ("", "has no samples"), ("{", "line 1: the line is not JSON"), ("[]", "line 1: a JSON object"), ("{}", "question"),
    ('{"question": " "}', "question"), ('{"question": "a", "box": 1}', 'unknown field "box"'),
    ('{"question": "a", "image": "none.png"}', "line 1: .*none.png"), ('{"question": "a", "images": "x"}', "list of"),
    ('{"question": "a", "needle": "a", "boxes": [{}]}', "must not have both"),
    ('{"question": "a", "boxes": [{"box": [0, 0, 1, 1], "text": "b"}]}', "the sample has 0 images"),
    ('{"question": "a a", "needle": "a"}', "exactly once"), ('{"question": "a", "answer": 5}', "must be text"),
    ('{"question": "a", "earlier": "b"}', '"earlier" must be a list'),
    ('{"question": "a", "earlier": [{"question": "b"}]}', '"earlier" must be a list'),
    ('{"question": "a", "earlier": [{"question": "b", "answer": 1}]}', '"earlier" must be a list'),
    ('{"question": "a", "image": "IMAGE", "boxes": [{"box": [0, 0, 1], "text": "b"}]}', "a box must be"),
    ('{"question": "a", "image": "IMAGE", "boxes": [{"box": [0, 0, 1, 1]}]}', 'needs a "text"'),
    ('{"question": "a", "image": "IMAGE", "boxes": [{"box": [0, 0, 101, 1], "text": "b"}]}', "is not inside"),
    ('{"question": "a", "image": "IMAGE", "boxes": [{"box": [9, 0, 9, 1], "text": "b"}]}', "is not inside"),
    ('{"question": "a", "image": "IMAGE", "boxes": [{"box": [0, 0, "1", 1], "text": "b"}]}', "four numbers"),
])  # fmt: skip
def test_samples_that_cannot_be_used(tmp_path, picture_file, line, says):
    path = tmp_path / "own.jsonl"
    path.write_text(line.replace("IMAGE", str(picture_file("a.png", 100, 60))))
    with pytest.raises(UsageError, match=says):
        read_jsonl(path)


# Runs


@pytest.mark.parametrize("kind", ["visual", "retrieval"])
def test_calibrating_the_heads_of_the_demo_model(kvedge, tmp_path, kind):
    out = tmp_path / "heads.json"
    arguments = ["--kind", kind, "--samples", 4, "--threads", 1, "--output", out]
    done = kvedge("calibrate", "heads", *arguments, "--json")
    assert done.code == 0 and done.err == "", done
    made = profile.load(out)
    assert done.json["file"] == str(out) and done.json["profile"] == json.loads(out.read_text())
    assert made.kind == f"{kind}-heads" and made.samples == 4 and made.model_hash == profiles.hash_of(DEMO.model)
    assert made.about["made"]["labelled_tokens"] >= 8 and made.about["model"]["name"] == "demo-model.gguf"
    shipped = profile.load(profiles.SHIPPED / profiles.file_name(made.kind, made.model_hash))
    # the same few heads are strong
    assert set(np.argsort(-made.values, axis=None)[:4]) & set(np.argsort(-shipped.values, axis=None)[:4])
    picture, reference = scene_with_code(tmp_path)
    arguments = ["--profile", out, "--method", "mixkv-sparsemm", "--budget", 0.8, "--image", picture]
    assert kvedge("chat", *arguments, "What is the code?").out.strip() == reference


def scene_with_code(folder):
    from PIL import Image

    [sample] = itertools.islice(held_out("code", 5), 1)
    Image.fromarray(sample.images()[0]).save(folder / "s.png")
    return folder / "s.png", sample.answer


def test_calibrating_prefixkv_on_the_demo_model(kvedge, tmp_path):
    where = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    arguments = ["calibrate", "prefix", "--samples", 2, "--budget", "0.2,0.5", "--threads", 1]
    done = kvedge(*arguments, env=where)
    assert done.code == 0 and done.err == "" and "percent of the prompt kept" in done.out
    [path] = tmp_path.rglob("*.json")  # the user's folder, where chat finds profiles
    made = profile.load(path)
    assert made.budgets == (0.2, 0.5) and made.values.shape == (5, 2) and made.samples == 2
    np.testing.assert_allclose(made.values.mean(axis=0), made.budgets, atol=0.01)  # the budget, except its minimum
    assert (np.diff(made.values, axis=1) > 0).all()


def test_calibrating_the_redundancy_of_the_demo_model(kvedge, tmp_path):
    where = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    arguments = ["calibrate", "heads", "--kind", "redundancy", "--samples", 6, "--threads", 1]
    done = kvedge(*arguments, env=where)
    assert done.code == 0 and done.err == "" and "mean similarity of two keys in percent" in done.out
    [path] = tmp_path.rglob("*.json")  # the user's folder, where chat finds profiles
    made = profile.load(path)
    assert made.kind == "key-redundancy" and made.values.shape == (5, 2) and made.samples == 6
    assert made.about["made"]["command"] == "kvedge calibrate heads --kind redundancy --samples 6"
    shipped = profile.load(profiles.SHIPPED / path.name)
    np.testing.assert_allclose(made.values, shipped.values, atol=0.05)  # one of each task, as in the 50
    picture, reference = scene_with_code(tmp_path)
    arguments = ["--method", "mixkv", "--set", "scorer.source=profile", "--budget", 0.8, "--image", picture]
    for given in ([], ["--profile", path]):
        assert kvedge("chat", *arguments, *given, "What is the code?", env=where).out.strip() == reference


def test_redundancy_needs_neither_boxes_nor_images(kvedge, tiny, tmp_path):
    data, out = tmp_path / "own.jsonl", tmp_path / "out.json"
    data.write_text('{"question": "What is the code of a star that no image shows?"}\n{"question": "And why?"}\n')
    arguments = ["calibrate", "heads", "--kind", "redundancy", *tiny("llama").arguments()]
    done = kvedge(*arguments, "--data", data, "--output", out, "--json")
    assert done.code == 0 and done.json["profile"]["samples"] == 2 and done.json["profile"]["kind"] == "key-redundancy"


def test_shares_are_those_of_the_online_search(demo):
    [sample] = itertools.islice(scenes("prefix"), 1)
    values, used = kept_shares(demo, (0.3,), [sample], 1)
    with DEMO.session(pykvedge.plan("prefixkv", 0.3)) as session:
        n = session.ask(sample.question, sample.pictures).report.tokens.prompt
        kept = [heads[0] for heads in session.engine.cache.lengths()]
    assert used == 1
    np.testing.assert_allclose(values[:, 0], np.array(kept) / n)


def test_the_shipped_heads_really_look_at_the_box(demo):
    """Hit rates on unseen codes, by the cells that the task names, not by data of the calibration."""
    shipped = profile.load(profiles.SHIPPED / profiles.file_name("visual-heads", profiles.hash_of(DEMO.model)))
    hits, total = np.zeros((5, 4)), 0
    for sample in itertools.islice(held_out("code", seed=31), 6):
        [image] = sample.images()
        pieces = demo.first_prompt(sample.question.text, [Picture("scene", 240, 240, image.tobytes())])
        offset = 0
        for piece in pieces:
            if isinstance(piece, ImagePiece):
                break
            offset += piece.n_tokens
        engine = demo.engine
        engine.close()
        engine.make_room(pieces, FULL)
        engine.encode(pieces, lambda *_: None, None)
        engine.prefill(pieces, lambda *_: None, None)
        engine.cache.watch(True)
        cells = [offset + row * 12 + col for _, row, col in (source[0] for source in sample.question.sources[1:])]
        tokens = demo.model.tokenize(" " + sample.answer)[-len(sample.answer) :]
        engine.extend(demo.model.tokenize(" " + sample.answer)[0])  # the space before the code
        for token, cell in zip(tokens, cells, strict=True):
            if len(demo.model.piece(token).strip()) != 1:
                break
            for layer, head in itertools.product(range(5), range(4)):
                hits[layer, head] += engine.cache.attention(layer, head).argmax() == cell
            total += 1
            engine.extend(token)
        demo.release(pieces)
    rates = hits / total
    assert total >= 20
    top = np.argsort(-shipped.values, axis=None)
    assert rates.flat[top[:3]].mean() > 0.9
    assert rates.flat[top[:3]].mean() > 3 * rates.flat[top[3:]].mean()
    assert np.corrcoef(rates.ravel(), shipped.values.ravel())[0, 1] > 0.8


def test_a_needle_in_the_text_is_a_source_too(demo):
    question = "The code is 7KE4. What is the code?"
    scorer = HeadScorer(demo, "retrieval-heads")
    assert scorer.add(Labelled(question, (), (), "7KE4", "no model says this")) == 0
    with DEMO.session() as session:
        said = session.ask(question).read().strip()
    found = scorer.add(Labelled(question, (), (), "7KE4", said))  # as if the answer came from the needle
    scores = scorer.scores()
    assert found == scores.tokens >= 1 and scores.samples == 1
    assert 0 < scores.values.max() <= 1 and scores.values.min() >= 0


def test_heads_that_cannot_be_told_apart_are_no_profile(kvedge, tiny, picture_file, tmp_path):
    picture = picture_file("a.png", 100, 60)
    data, out = tmp_path / "own.jsonl", tmp_path / "out.json"
    data.write_text(json.dumps({"image": str(picture), "question": "What?", "answer": "a cat on a mat",
                                "boxes": [{"box": [0, 0, 50, 60]}]}))  # fmt: skip
    arguments = ["calibrate", "heads", *tiny("llava").arguments(), "--data", data, "--output", out]
    kvedge(*arguments).failed(1, "no answer contains the text of its boxes", "--data")
    assert not out.exists()


def test_stopping_writes_nothing(demo, tmp_path, monkeypatch):
    cancel = threading.Event()
    seen = []

    def progress(what, share):
        seen.append(share)
        if len(seen) == 3:
            cancel.set()

    with pytest.raises(CancelledError):
        score_heads(demo, "visual-heads", scenes("visual-heads"), 10, progress, cancel)
    assert seen == [0.0, 0.1, 0.2]

    def stopped(*_, **__):
        raise CancelledError

    monkeypatch.setattr(HeadScorer, "add", stopped)
    out = tmp_path / "out.json"
    run = CliRunner().invoke(calibrate, ["heads", "--threads", "1", "--output", str(out)])
    assert isinstance(run.exception, CancelledError) and not out.exists()
    assert "no profile was written" in run.output


@pytest.mark.parametrize(("arguments", "words"), [
    (["heads", "--kind", "visul"], ["did you mean 'visual'"]),
    (["heads", "--samples", "0"], ["--samples must be at least 1"]),
    (["prefix", "--budget", "0.5,0.2"], ["ascending"]),
    (["prefix", "--budget", "0.5,1.0"], ["below 1.0"]),
    (["prefix", "--budget", "half"], ["--budget must be shares", "half"]),
    (["heads", "--data", "/nowhere/none.jsonl"], ["none.jsonl", "No such file"]),
    (["heads", "--mmproj", "x.gguf"], ["no model"]),
    (["heads", "--output", "/"], ["--output / is a folder"]),
    (["budgets", "--output", "/"], ["--output / is a folder"]),
])  # fmt: skip
def test_bad_requests(refused, arguments, words):
    refused("calibrate", *arguments).failed(2, *words)


def test_help_teaches(kvedge):
    shown = kvedge("calibrate", "--help").out + kvedge("calibrate", "heads", "--help").out
    for word in ("prefix", "heads", "sparsemm", "--data", '"boxes"', "kvedge chat"):
        assert word in shown


def test_errors_of_the_scorer_are_named(demo):
    with pytest.raises(KvedgeError, match="no answer contains"):
        HeadScorer(demo, "visual-heads").scores()
    with pytest.raises(UsageError, match="boxes"):
        HeadScorer(demo, "visual-heads").add(Labelled("What is the code?", ()))
