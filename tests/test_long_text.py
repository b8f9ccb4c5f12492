"""Long texts with many special tokens: the tokens are llama.cpp's, in time that grows with the text alone."""

from __future__ import annotations

import random

import pytest
from server import DEMO

import pykvedge
from pykvedge.models.composer import Composer
from pykvedge.models.prompt import Message


@pytest.fixture(scope="module")
def vocabulary(native):
    with pykvedge.load(DEMO / "demo-model.gguf", DEMO / "demo-mmproj.gguf", threads=1) as loaded:
        loan = loaded.lend()
        yield loan.model
        loan.give_back()


def whole(vocabulary, text):
    """Cuts a text in one call."""
    data = text.encode()
    out = (vocabulary.llama.llama_token * (len(data) + 8))()
    n = vocabulary.llama.llama_tokenize(vocabulary.vocab, data, len(data), out, len(out), False, True)
    return list(out[:n])


def test_a_text_in_parts_has_the_same_tokens(vocabulary):
    chance = random.Random(1)
    for n in (200, 700, 3000):
        rest = [" hello", "a  b ", "\n", "", "<|", "é漢", "x" * 30]
        text = "".join(chance.choice(["<s>", "</s>", "<unk>"]) + chance.choice(rest) for _ in range(n)) + "y" * 4200
        assert vocabulary.tokenize(text) == whole(vocabulary, text)
        assert set(vocabulary.special_words(text)) == {"<s>", "</s>", "<unk>"}


def test_special_words_that_people_wrote_stay_text(vocabulary):
    composer = Composer(vocabulary, None)
    control = {token for token in range(vocabulary.n_vocab) if not vocabulary.piece(token)}
    values = {"a": ["x", {"b": ["</s>"]}], "c": 5}
    for n in (1, 50_000):
        written = composer.first([Message("user", "</s>" * n)], values)
        tokens = composer.pieces(written, [])[0].tokens
        assert len(tokens) > 4 * n and sum(token in control for token in tokens) <= 3
    assert composer._hide_in({"a": ["x", "y"]}, {}) == {"a": ["x", "y"]}
    hidden = {}
    assert "</s>" not in str(composer._hide_in(values, hidden)) and list(hidden.values()) == ["</s>"]
