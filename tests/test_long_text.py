"""Long texts with many special tokens: llama.cpp's tokens, in time proportional to the text."""

import random

import batches
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


def test_a_text_in_parts_has_the_same_tokens(vocabulary):
    chance = random.Random(1)
    for n in (200, 700, 3000):
        rest = [" hello", "a  b ", "\n", "", "<|", "é漢", "x" * 30]
        text = "".join(chance.choice(["<s>", "</s>", "<unk>"]) + chance.choice(rest) for _ in range(n)) + "y" * 4200
        assert vocabulary.tokenize(text) == batches.tokenize(vocabulary.vocab, text)  # in one call
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


WORDS = """
import os, sys
import gguf
from pykvedge.models.vocabulary import Vocabulary
from pykvedge.native import llamacpp

printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
others = (byte for byte in range(256) if byte not in printable)
letters = [chr(byte) for byte in printable] + [chr(256 + i) for i, _ in enumerate(others)]  # as GPT-2 writes bytes
path = sys.argv[1]
out = gguf.GGUFWriter(path, "llama")
out.add_tokenizer_model("gpt2")
out.add_tokenizer_pre("deepseek-coder")  # which llama.cpp has regular expressions for, and no code
out.add_token_list([*letters, "aa", "</s>"])
out.add_token_types([1] * (len(letters) + 1) + [3])
out.add_token_merges(["a a"])
out.add_eos_token_id(len(letters) + 1)
out.write_header_to_file()
out.write_kv_data_to_file()
out.write_tensors_to_file()
out.close()

llama = llamacpp.start(False, False)
params = llama.llama_model_default_params()
params.vocab_only = True
vocabulary = Vocabulary(llama, llama.llama_model_load_from_file(os.fsencode(path), params))

def whole(text):
    return vocabulary._cut(text, True)

for letter in "a !1":
    n = len(vocabulary.tokenize(letter * 100_000))
    print(letter, n)
words = "aaa b, c  d! " * 2000
assert vocabulary.tokenize(words) == whole(words)
mixed = words + "</s>" + words + "</s></s>"
assert vocabulary.tokenize(mixed) == whole(mixed)
end = vocabulary.n_vocab - 1
for before in (8186, 8188, 8190, 8191, 8192, 8193):  # where a line may be parted
    text = "!" * before + "</s>" + "!" * 9000
    assert vocabulary.tokenize(text).count(end) == 1, before
    assert vocabulary.tokenize(text, special=False).count(end) == 0
print("done")
"""


def test_a_word_of_100_000_letters_is_no_end_of_the_process(started, tmp_path):
    """llama.cpp's regular expressions overflow the stack for this word. Shorter words have its tokens."""
    done = started(tmp_path / "words.gguf", program=("-c", WORDS), timeout=120)
    assert done.code == 0, done.err[-2000:]
    lines = done.out.splitlines()
    assert lines[0] == "a 50000" and lines[-1] == "done" and len(lines) == 5
