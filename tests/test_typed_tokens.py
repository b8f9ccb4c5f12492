"""Typed text stays text, even the text of a special token or the word that stands for a picture.

Special tokens are read here from the file. llama.cpp's tokeniser decides what a text means.
"""

import ctypes
import json

import pytest
from gguf import GGUFReader

import pykvedge
from kvedge_lab.eval.measure import Preparer
from kvedge_lab.eval.tasks import DialogMessage, Sample
from pykvedge.models.composer import Composer, PromptText
from pykvedge.models.images import load_picture
from pykvedge.models.vision import ImagePiece, TextPiece

KINDS = ["llama", "llava", "qwen2vl", "qwen3", "phi3", "gemma3"]
FEW = pykvedge.Sampling(temp=0, max_tokens=4)
BENIGN = "Say {}, and {} again: \u00fcber 3 <b> | \u56fe [INST] <notatoken>."
CONTROL, UNKNOWN = 3, 2  # tokenizer.ggml.token_type


def specials(path):
    """Returns {text: number} of a file's control and unknown tokens."""
    fields = GGUFReader(path).fields
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    kinds = [int(types.parts[i][0]) for i in types.data]
    texts = [bytes(tokens.parts[i]).decode() for i in tokens.data]
    return {text: i for i, (text, kind) in enumerate(zip(texts, kinds, strict=True)) if kind in (CONTROL, UNKNOWN)}


def spoken(model, tokens):
    """Returns the tokens as text, with special tokens written out."""
    out = b""
    for token in tokens:
        buffer = ctypes.create_string_buffer(256)
        n = model.llama.llama_token_to_piece(model.vocab, token, buffer, 256, 0, True)
        out += buffer.raw[:n]
    return out.decode("utf-8", "replace")


def tokens_of(pieces):
    return [token for p in pieces if isinstance(p, TextPiece) for token in p.tokens]


def hostile(path):
    """Returns a text with every special token's text: alone, between words and one after the other."""
    words = list(specials(path))
    return "A" + "".join(words) + " and ".join(words) + f"x{words[-1]}\n{words[0]} B"


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_without_such_words_is_read_as_a_whole(tiny, native, kind):
    with tiny(kind).session(system="Be <brief>.") as session:
        text = BENIGN.format("<|x|>", "s>")
        composer = Composer(session.model, session._vision)
        asked = [pykvedge.Message("system", "Be <brief>."), pykvedge.Message("user", text)]
        turns = [asked, [*asked, pykvedge.Message("assistant", "Yes."), pykvedge.Message("user", text)]]
        for written in (composer.first(turns[0]), composer.first(turns[1]), composer.following(turns[1])):
            assert not written.hidden and text in written.text
            assert tokens_of(composer.pieces(written, [])) == session.model.tokenize(written.text)


@pytest.mark.parametrize("kind", KINDS)
def test_putting_words_back_changes_no_token(tiny, native, kind):
    """Words that are hidden and put back do not change the tokens of the text around them."""
    with tiny(kind).session() as session:
        composer, model = Composer(session.model, None), session.model
        end = model.special_text("eos")
        for word in ("quick", " quick ", "uick br", "\n"):
            text = f"{end}The quick brown\n fox{end}\n jumps quick {end}{end}quick"
            stand_in = "0123456789abcdef" * 2
            hidden = {stand_in: word}
            assert composer.tokens(PromptText(text.replace(word, stand_in), hidden)) == model.tokenize(text)


@pytest.mark.parametrize("kind", KINDS)
def test_typed_special_tokens_are_text(tiny, native, kind):
    files = tiny(kind)
    special, text = specials(files.model), hostile(files.model)
    with files.session(system=text) as session:
        model = session.model
        assert set(model.tokenize(text)) & set(special.values())  # a plain tokeniser would find special tokens

        def count(content, answer):
            messages = [pykvedge.Message("system", content), pykvedge.Message("user", content)]
            composer = Composer(model, session._vision)
            first = tokens_of(composer.pieces(composer.first(messages), []))
            more = [*messages, pykvedge.Message("assistant", answer), pykvedge.Message("user", content)]
            after = tokens_of(composer.pieces(composer.following(more), []))
            again = tokens_of(composer.pieces(composer.first(more), []))
            return [[t for t in tokens if t in special.values()] for tokens in (first, after, again)], first, after

        plain, *_ = count("Hello there.", "Yes.")
        typed, first, after = count(text, text)
        assert typed == plain
        assert spoken(model, first).count(text) == 2 and spoken(model, after).count(text) == 1
        [piece] = session.first_prompt(text)
        assert text in spoken(model, piece.tokens)
        n = len(model.tokenize(text, special=False))
        assert say(session, text).tokens.prompt > 2 * n and say(session, text).tokens.prompt > n  # the system text too


@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
def test_a_typed_image_marker_is_no_image(tiny, picture_file, native, kind):
    files = tiny(kind)
    text = hostile(files.model)
    with files.session() as session:
        marker = session._vision.marker
        pictures = [load_picture(picture_file()), load_picture(picture_file("b.png", 60, 90))]
        for words in (f"{marker} is a word", f"{text} <image> {marker} <image> {marker}{text}", text):
            pieces, plain = session.first_prompt(words, pictures), session.first_prompt("<image> a <image>", pictures)
            images = [
                [(p.n_tokens, p.key.partition("/")[0]) for p in x if isinstance(p, ImagePiece)] for x in (pieces, plain)
            ]
            assert images[0] == images[1]
            written = spoken(session.model, tokens_of(pieces))
            assert written.count(marker) == words.count(marker) and written.count(text) == words.count(text)
            special = set(specials(files.model).values())
            assert [t for t in tokens_of(pieces) if t in special] == [t for t in tokens_of(plain) if t in special]
            session.release(pieces)
            session.release(plain)
        report = say(session, f"{text} {marker}", pictures)
        assert report.tokens.image == sum(n for n, _ in images[0])
        assert say(session, f"{marker} again", pictures[:1]).tokens.image == images[0][0][0]
        assert say(session, f"{marker} and {text}").tokens.image == 0


def test_the_word_of_a_place_that_is_a_special_token(tiny, picture_file, native):
    """MiniCPM-V and SmolVLM have a token <image>: a picture leaves none in the prompt, and a typed word stays text."""
    files = tiny("minicpmv")
    special = specials(files.model)["<image>"]
    with files.session() as session:
        pictures = [load_picture(picture_file()), load_picture(picture_file("b.png", 60, 90))]
        for words, shown in (
            ("See <image> and <image>.", pictures), ("See \\<image>, <image> and <image>.", pictures),
            ("A \\<image>.", []), ("A \\<image>.", pictures[:1]),
        ):  # fmt: skip
            pieces, plain = session.first_prompt(words, shown), session.first_prompt("See them.", shown)
            written, n = spoken(session.model, tokens_of(pieces)), tokens_of(plain).count(special)
            assert len({p.key.partition("/")[0] for p in pieces if isinstance(p, ImagePiece)}) == len(shown)
            assert tokens_of(pieces).count(special) == n >= len(shown)
            assert written.count("<image>") == n + words.count("\\<image>") and "\\" not in written
            session.release(pieces)
            session.release(plain)


def say(session, *arguments):
    answer = session.ask(*arguments, sampling=FEW)
    answer.read()
    return answer.report


def test_typed_words_in_a_stream(tiny, picture_file, native):
    files = tiny("llava")
    text = hostile(files.model)
    with files.session(pykvedge.plan("snapkv", 256), stream=True) as session:
        marker = session._vision.marker
        plain = say(session, "Hello", [picture_file()]).tokens
        report = say(session, f"{text} {marker}", [picture_file()])
        assert report.tokens.image == plain.image
        expected = len(session.model.tokenize(f"{text} {marker}", special=False))
        assert report.tokens.prompt >= plain.image + expected


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_typed_words_in_a_data_set(tiny, native, kind):
    files = tiny(kind)
    special, text = set(specials(files.model).values()), hostile(files.model)
    with files.session() as session:
        preparer = Preparer(session.model, None)

        def prepared(content):
            lines = tuple(DialogMessage(role, content) for role in ("user", "assistant", "user"))
            return preparer.prepare(Sample("s", "text", lines, content, "ppl"))

        typed, plain = prepared(text), prepared("Hello there.")
        for (pieces, reply), (others, other) in zip(typed.turns, plain.turns, strict=True):
            assert [t for t in tokens_of(pieces) if t in special] == [t for t in tokens_of(others) if t in special]
            assert not set(reply) & special and not set(other) & special
        assert not set(typed.answer) & special
        assert text in spoken(session.model, typed.answer) and text in spoken(session.model, typed.turns[0][1])


def test_such_words_in_the_values_of_a_template_are_text_too(tiny, native):
    """In texts, keys and lists at any depth; other values reach the template unchanged."""

    class Template:
        def first(self, messages, marker, values):
            self.values = values
            return "".join(map(str, messages))

    with tiny("llama").session() as session:
        composer, end = Composer(session.model, None), session.model.special_text("eos")
        composer._template = template = Template()
        tool = {"name": f"a{end}b", "least": 3, "strict": True, "of": [None, 0.5, end]}
        written = composer.first([pykvedge.Message("user", "Hi")], {"tools": [tool], end: ("x", "y")})
    assert end not in json.dumps(template.values)

    def shown(value):
        text = json.dumps(value)
        for stand_in, word in written.hidden.items():
            text = text.replace(stand_in, word)
        return json.loads(text)

    assert shown(template.values) == {"tools": [tool], end: ["x", "y"]}
