"""Log-probabilities of an answer's tokens, against another log-softmax."""

import json
import math

import numpy as np
import pytest

from pykvedge import Sampling, Token, UsageError
from pykvedge.runtime import logprobs

QUESTION = "What is there to see, and what is it good for?"


def oracle(logits):
    """Returns the logarithms of probabilities, summed with Python's numbers."""
    top = max(logits)
    total = math.fsum(math.exp(x - top) for x in logits)
    return [x - top - math.log(total) for x in logits]


@pytest.mark.parametrize("settings", [{}, {"temp": 1.5, "seed": 2, "top_k": 0}, {"presence_penalty": 5.0}])
def test_each_token_has_its_probability(session, settings):
    answer = session.ask(QUESTION, sampling=Sampling(**settings, max_tokens=12, logprobs=5))
    answer.read()
    model, with_ = session.model, answer.tokens
    session.clear()
    replay = session.ask(QUESTION)
    for i, token in enumerate(with_):
        logits = session.engine.context.logits().tolist()
        expected = oracle(logits)
        assert isinstance(token, Token) and token.data == model.piece(token.id)
        assert token.text == token.data.decode("utf-8", "replace")
        assert token.logprob == pytest.approx(expected[token.id], abs=1e-9)
        best = sorted(range(len(expected)), key=lambda t: (-logits[t], t))[:5]
        assert [other.id for other in token.top] == best
        assert [other.logprob for other in token.top] == pytest.approx([expected[t] for t in best], abs=1e-9)
        assert [other.data for other in token.top] == [model.piece(t) for t in best]
        if i + 1 < len(with_):
            session.engine.extend(token.id)
    replay.close()
    assert len(with_) > 4


def test_ties_and_what_cannot_come():
    logits = np.array([1.0, 3.0, 3.0, -np.inf, 3.0, 0.0], np.float32)
    token = logprobs.token(3, logits, 2, lambda t: bytes([97 + t]))
    assert [other.id for other in token.top] == [1, 2] and token.logprob == -math.inf
    shown = json.loads(json.dumps(token.as_json(), allow_nan=False))
    assert shown["logprob"] is None and shown["bytes"] == [100] and shown["text"] == "d"
    all_of_them = logprobs.token(0, logits, 20, lambda t: b"")
    assert len(all_of_them.top) == 6 and logprobs.token(0, logits, 0, lambda t: b"").top == ()
    assert sum(math.exp(other.logprob) for other in all_of_them.top) == pytest.approx(1.0)


def test_without_being_asked_for_there_are_none(session):
    answer = session.ask(QUESTION, sampling=Sampling(max_tokens=5))
    answer.read()
    assert answer.tokens == [] and answer.report.logprobs is None and "logprobs" not in answer.report.as_json()


def test_they_change_no_answer(session):
    texts = []
    for n in (None, 0, 20):
        session.clear()
        answer = session.ask(QUESTION, sampling=Sampling(max_tokens=20, temp=1.0, seed=9, logprobs=n))
        texts.append(answer.read())
        assert n is None or all(len(t.top) == n for t in answer.tokens)
        assert n is None or len(answer.tokens) == answer.report.tokens.generated
    assert len(set(texts)) == 1


@pytest.mark.parametrize("n", [-1, 21, 1.5, "3"])
def test_numbers_that_cannot_be(n):
    with pytest.raises(UsageError, match="logprobs"):
        Sampling(logprobs=n)


def test_the_option(kvedge, tiny):
    base = ["chat", *tiny("llama").arguments(), "--max-tokens", 6]
    done = kvedge(*base, "--json", "--logprobs", 2, "Hello").json
    assert len(done["logprobs"]) == done["tokens"]["generated"]
    for token in done["logprobs"]:
        assert set(token) == {"id", "text", "bytes", "logprob", "top"} and len(token["top"]) == 2
        assert token["top"][0] == {key: token[key] for key in ("id", "text", "bytes", "logprob")}  # the likeliest
    text = b"".join(bytes(token["bytes"]) for token in done["logprobs"]).decode("utf-8", "replace")
    assert text.removeprefix(" ") == done["text"]
    kvedge(*base, "--logprobs", 2, "Hello").failed(2, "--json")
    kvedge(*base, "--json", "--logprobs", 21, "Hello").failed(2, "between 0 and 20")
