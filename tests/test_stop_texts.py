"""An answer ends before a stop text, however it is tokenised, and the conversation goes on from the shown text."""

import random

import pytest

from pykvedge import Sampling, UsageError
from pykvedge.runtime.generation import StopTexts

QUESTION = "What is there to see, and what is it good for?"
N = 40


def cut(text, pieces):
    """Returns the text in random pieces."""
    places = sorted(random.Random(pieces).choices(range(len(text) + 1), k=pieces - 1))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def before_stop(text, stops):
    """Returns the text before the first complete stop text (the longest, if several end there); None without one."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return None


def test_a_stop_text_is_found_however_the_text_is_cut():
    for seed in range(200):
        rng = random.Random(seed)
        text = "".join(rng.choices("ab\n", k=rng.randint(0, 40)))
        stops = ["".join(rng.choices("ab\n", k=rng.randint(2, 6))) for _ in range(rng.randint(1, 3))]
        expected = before_stop(text, stops)
        watcher, out, since = StopTexts(stops), "", ""
        for piece in cut(text, rng.randint(1, 20)):
            since += piece
            out += watcher.feed(piece)
            if watcher.found:
                break
            # held-back text could begin a stop text; all other text is shown
            assert out + watcher.pending_text == since
            assert not watcher.pending_text or any(stop.startswith(watcher.pending_text) for stop in stops)
        out += watcher.finish()
        assert watcher.found == (expected is not None) and out == (expected if watcher.found else text), seed


@pytest.fixture
def plain(session):
    """The text and the tokens of an answer without stop texts."""
    tokens = []
    answer = session.ask(QUESTION, sampling=Sampling(max_tokens=N))
    for _ in answer:
        tokens += session.pending
    text = answer.report.text
    session.clear()
    return text, tokens


def ends(text, tokens, model):
    """Returns the end of each token in the text."""
    lead = b"".join(map(model.piece, tokens)).decode("utf-8", "replace")
    first = len(lead) - len(lead.removeprefix(" "))
    out, data = [], b""
    for token in tokens:
        data += model.piece(token)
        out.append(len(data.decode("utf-8", "replace")) - first)
    return out


@pytest.mark.parametrize("several", [False, True])
def test_the_answer_ends_before_the_text(session, plain, several):
    text, _ = plain
    assert len(text) > 30
    for start in range(0, len(text) - 8, 5):
        for length in (1, 3, 8):
            stop = text[start : start + length]
            session.clear()
            given = ["nowhere to be found", stop, text[-1]] if several else stop
            answer = session.ask(QUESTION, sampling=Sampling(max_tokens=N, stop=given))
            pieces = list(answer)
            expected = before_stop(text, given if several else [stop])
            assert "".join(pieces) == answer.report.text == session.messages[-1].text == expected
            assert answer.report.finish == "stop" and answer.report.as_json()["stop"] == "stop"
            assert "" not in pieces


def test_a_text_that_does_not_come_changes_nothing(session, plain):
    text, _ = plain
    answer = session.ask(QUESTION, sampling=Sampling(max_tokens=N, stop=[text[-4:] + "?", text[5:9] + "!" * 9]))
    pieces = list(answer)
    assert "".join(pieces) == text and answer.report.finish in ("length", "end")
    assert len(pieces) > N // 4  # it was shown in pieces


def test_an_answer_that_is_closed_keeps_what_was_held_back(session, plain):
    text, _ = plain
    answer = session.ask(QUESTION, sampling=Sampling(max_tokens=N, stop=text[3:] + "never"))
    shown = next(answer)
    answer.close()
    assert answer.report.finish == "cancelled" and text.startswith(answer.report.text)
    assert len(answer.report.text) >= len(shown) and session.messages[-1].text == answer.report.text


def next_answer(session):
    answer = session.ask("And then?", sampling=Sampling(max_tokens=12))
    return answer.report.tokens.prompt, answer.read()


def expected_after(tiny, n, pending):
    """Returns the next answer after n read tokens, with these pending tokens."""
    with tiny("llama").session() as session:
        session.ask(QUESTION, sampling=Sampling(max_tokens=n + 1)).read()
        session.pending = pending
        return next_answer(session)


def test_the_next_message_follows_what_was_read(tiny, session, plain):
    """A stop text of several tokens, one at the end of a token, and one in the middle of a token."""
    text, tokens = plain
    model, places = session.model, ends(*plain, session.model)
    seen = set()
    for i in range(2, len(tokens) - 2):
        for at, end in {(places[i - 1], places[i + 1]), (places[i] - 1, places[i]), (places[i - 1] + 1, places[i])}:
            stop = text[at:end]
            if not stop or text.find(stop) != at or end not in (places[i], places[i + 1]):
                continue
            last = places.index(end)  # the token that completes it
            part = text[places[last - 1] : at] if at > places[last - 1] else ""
            pending = model.tokenize(part, special=False) if part else []
            if b"".join(map(model.piece, pending)) != part.encode():
                pending = [tokens[last]]
            kind = (len(part) > 0, last > i)
            if kind in seen:
                continue
            seen.add(kind)
            session.clear()
            report = session.ask(QUESTION, sampling=Sampling(max_tokens=N, stop=stop))
            assert report.read() == text[:at] and report.report.tokens.generated == last + 1
            assert session.pending == pending and session.in_cache
            assert next_answer(session) == expected_after(tiny, last, pending)
    assert len(seen) >= 2


def test_undo_and_files_after_a_stop_text(tiny, native, plain, tmp_path):
    text, _ = plain
    stopping = Sampling(max_tokens=N, stop=text[10:14])
    with tiny("llama").session(undo=True) as session:
        session.ask("Hello", sampling=Sampling(max_tokens=5)).read()
        whole = session.ask(QUESTION, sampling=Sampling(max_tokens=12)).read()
        session.retry(stopping).read()
        assert session.retry(Sampling(max_tokens=12)).read() == whole
        session.clear()
        session.ask(QUESTION, sampling=stopping).read()
        session.save(tmp_path / "s.kvs")
        expected = next_answer(session)
    with tiny("llama").session() as session:
        session.load(tmp_path / "s.kvs")
        assert session.messages[-1].text == text[: text.find(text[10:14])]
        assert next_answer(session) == expected


@pytest.mark.parametrize("stop", [5, b"x", [1], [""], "", ["x"] * 65, "x" * 1001, {"a": 1}])
def test_stop_texts_that_are_none(stop):
    with pytest.raises(UsageError, match="stop") as error:
        Sampling(stop=stop)
    assert "\n" not in str(error.value)


def test_the_option(kvedge, tiny, plain):
    text, _ = plain
    base = ["chat", *tiny("llama").arguments(), "--method", "full", "--json", "--max-tokens", N]
    done = kvedge(*base, "--stop", "never", "--stop", text[8:12], QUESTION).json
    assert done["stop"] == "stop" and done["text"] == text[: text.find(text[8:12])]
    assert kvedge(*base, QUESTION).json["stop"] in ("length", "end")
    kvedge(*base, "--stop", "", QUESTION).failed(2, "stop takes up to")
