"""The report of a turn: why its answer ended, its model, and figures with the same meaning in every turn."""

import re

import pytest
from conftest import ROOT
from conversations import WORDS, say

import pykvedge
from pykvedge import Sampling, UsageError
from pykvedge.models.gguf import read_header
from pykvedge.models.modelfile import facts
from pykvedge.models.vision import ImagePiece

DATA = ROOT / "pykvedge" / "data"
FEW = Sampling(max_tokens=3)
LINE = re.compile(r".* \| KV ([\d.]+)(?: -> ([\d.]+))? (?:MiB|KiB) \| [\d.]+ tok/s")


def test_figures_of_later_turns_are_those_of_the_conversation(tiny, native):
    """Full bytes: of a session that keeps all tokens. Kept bytes: of this session."""
    turns = [WORDS * 4, "And?", WORDS, "Or?"]
    with tiny("llama").session(pykvedge.plan("h2o", 0.2)) as small, tiny("llama").session() as full:
        for text in turns:
            a, b = say(small, text, sampling=FEW), say(full, text, sampling=FEW)
            assert a.tokens == b.tokens
            # blocks of a full cache are whole pages: at most one for keys and one for values per layer and turn
            assert b.kv.kept_bytes == b.kv.full_bytes >= a.kv.full_bytes >= b.kv.full_bytes - 2 * 2 * len(turns) * 65536
            assert a.kv.kept_bytes < a.kv.full_bytes
            shown = LINE.fullmatch(a.line())
            assert shown and float(shown[1]) > float(shown[2]), a.line()
            assert LINE.fullmatch(b.line())[2] is None, b.line()
        assert "all kept" in a.line()  # the short last message was kept; the conversation is compressed
        rows = sum(n for heads in small.engine.cache.lengths() for n in heads)
        assert a.kv.full_bytes == small.engine.cache.stats().n_tokens * _bytes_per_token(small) - _since(small, a)
        assert rows < small.engine.cache.stats().n_tokens * 2 * 2


def _bytes_per_token(session):
    return session.model.kv_bytes_per_token(2)


def _since(session, report):
    """Returns the bytes of the answer's tokens that were read after the figures were taken."""
    return (report.tokens.generated - len(session.pending)) * _bytes_per_token(session)


def test_the_demo_model_ends_its_answer_itself(kvedge, native):
    picture = sorted((ROOT / "examples").glob("*.png"))[0]
    done = kvedge("chat", "--image", picture, "--json", "What is the code?")
    report = done.json
    assert report["stop"] == "end" and report["text"] == report["text"].strip() != ""
    assert report["model"] == {"name": "kvedge demo model", "file": "demo-model.gguf", "quantisation": "Q8_0"}
    assert list(report)[:5] == ["model", "method", "budget", "text", "stop"]


def test_every_other_way_to_end(tiny, native):
    with tiny("llama").session(pykvedge.plan("h2o"), n_ctx=256) as session:
        assert say(session, "Hello", sampling=FEW).as_json()["stop"] == "length"
        answer = session.ask("Hello", sampling=Sampling(max_tokens=100))
        next(answer)
        answer.close()
        assert answer.report.as_json()["stop"] == "cancelled"
        assert say(session, "Go on", sampling=Sampling(max_tokens=1000)).as_json()["stop"] in ("context", "end")


def test_an_answer_does_not_begin_with_the_tokenizers_blank(native):
    model, mmproj = DATA / "demo-model.gguf", DATA / "demo-mmproj.gguf"
    with pykvedge.Session(model, mmproj) as session:
        answer = session.ask("What is the code?", [sorted((ROOT / "examples").glob("*.png"))[0]])
        token = session.engine.context.logits().argmax()
        assert session.model.piece(int(token)).startswith(b" ")  # begins with a space, which the text omits
        pieces = list(answer)
        assert "".join(pieces) == answer.report.text == session.messages[-1].text
        assert answer.report.text == answer.report.text.strip() and all(pieces)


def test_what_a_model_file_says_of_itself(tiny):
    header = read_header(tiny("llama").model)
    name, file, quantisation = facts(header)
    assert file == "model.gguf" and name and isinstance(quantisation, str)
    assert facts(read_header(DATA / "demo-model.gguf")) == ("kvedge demo model", "demo-model.gguf", "Q8_0")


def test_pictures_go_where_the_prompt_says(tiny, picture_file, native):
    a, b = picture_file("a.png", 80, 60), picture_file("b.png", 60, 90)
    with tiny("llava").session() as session:
        from pykvedge.models.images import load_picture

        first, second = load_picture(a), load_picture(b)
        pieces = session.first_prompt("Before <image> after <image> end", [second, first])
        kinds = [isinstance(p, ImagePiece) for p in pieces]
        assert kinds == [False, True, False, True, False]
        assert [p.key.partition("/")[0] for p in pieces if isinstance(p, ImagePiece)] == [second.key, first.key]
        session.release(pieces)
        placed = say(session, "Before <image> after <image> end", [a, b], FEW)
        assert placed.tokens.image == 32
        session.clear()
        assert say(session, "Before after end", [a, b], FEW).tokens.prompt > placed.tokens.prompt  # with names
        for text, images in (("<image>", []), ("<image> <image>", [a]), ("<image>", [a, b])):
            with pytest.raises(UsageError, match="for images"):
                session.ask(text, images)
        assert len(session.messages) == 2 and say(session, r"The word \<image>", [], FEW).tokens.image == 0


def test_pictures_of_a_stream_go_there_too(tiny, picture_file, native):
    a, b = picture_file("a.png", 80, 60), picture_file("b.png", 60, 90)
    with tiny("llava").session(pykvedge.plan("snapkv", 64), stream=True) as session:
        report = say(session, "Before <image> after <image> end", iter([a, b]), FEW)
        assert report.tokens.image == 32 and [p.name for p in session.messages[0].pictures] == ["a.png", "b.png"]
        before = session.engine.cache.stats().n_tokens
        for images in ([a], [a, b, a]):
            with pytest.raises(UsageError, match="2 places"):
                session.ask("Before <image> after <image> end", iter(images))
        assert session.engine.cache.stats().n_tokens == before  # nothing was read
        assert say(session, "More", iter([a, b, a]), FEW).tokens.image == 48


def test_the_command_line_refuses_places_without_pictures(kvedge, tiny, picture_file):
    arguments = ["chat", *tiny("llava").arguments(), "--image", picture_file()]
    kvedge(*arguments, "<image> or <image>?").failed(2, "2 places for images", "1 image was given")
    kvedge("chat", *tiny("llava").arguments(), "--image", "~nobody-of-that-name/x.png", "?").failed(2, "home folder")
    kvedge("chat", *tiny("llava").arguments(), "--image", "x" * 800, "?").failed(2, "--image", "too long")
    kvedge("chat", *tiny("llava").arguments(), "--session", "x" * 800, "?").failed(2, "--session", "too long")
