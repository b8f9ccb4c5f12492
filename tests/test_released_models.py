"""Vocabularies and chat templates of released models, from llama.cpp's source distribution.

Tokens are compared with the reference of each vocabulary, prompts with those of jinja2, which transformers uses.
"""

import contextlib
import copy
import functools
import json
import os
from datetime import datetime
from pathlib import Path

import jinja2
import pytest
from choosing import whole
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from modelgen import layers
from modelgen.released import extract
from modelgen.shapes import SHAPES
from modelgen.writer import write_gguf

from pykvedge.models import sandbox, vocabulary
from pykvedge.models.composer import Composer
from pykvedge.models.prompt import ChatTemplate, Message
from pykvedge.models.toolresults import tool_adapter
from pykvedge.native import llamacpp

N_VOCABULARIES, N_REFERENCES, N_TEMPLATES = 19, 15, 70  # in the pinned source
N_WRITTEN = 552  # prompts of 560; some templates do not support calls
BOS, EOS, MARKER = "<BOS>", "<EOS>", "<__media__>"


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The folder models/ of the pinned source."""
    return extract(tmp_path_factory.mktemp("released"))


# ------------------------------------------------------------------------------------------------- vocabularies


@contextlib.contextmanager
def opened(path):
    """Opens a vocabulary, which is not a complete model."""
    llama = llamacpp.start(False, vision=False)
    params = llama.llama_model_default_params()
    params.vocab_only = True
    handle = llama.llama_model_load_from_file(os.fsencode(path), params)
    yield vocabulary.Vocabulary(llama, handle)
    llama.llama_model_free(handle)


def references(path):
    """Returns the texts of a vocabulary's reference, and the tokens of each."""
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    tokens = [[int(word) for word in line.split()] for line in Path(f"{path}.out").read_text().split("\n")]
    return list(zip(texts, tokens, strict=False))


def test_tokens_are_the_references_and_special_ones_stay_text(native, released, monkeypatch, pytestconfig):
    paths = sorted(released.glob("ggml-vocab-*.gguf"))
    assert len(paths) == N_VOCABULARIES
    assert sum(Path(f"{path}.inp").exists() for path in paths) == N_REFERENCES
    n = 0
    paths = paths[:: 1 if pytestconfig.getoption("all") else 3]
    for path in paths:
        with opened(path) as model:
            if Path(f"{path}.inp").exists():
                check_references(model, path.name, references(path), monkeypatch)
            n += check_special(model, path.name)
    assert n > 5 * len(paths)


def check_references(model, name, told, monkeypatch):
    assert len(told) > 40
    for text, tokens in told:
        assert model.tokenize(text, special=False) == tokens, (name, text)
    whole = "\n".join(text for text, _ in told)
    with monkeypatch.context() as short:
        short.setattr(vocabulary, "LONG", len(whole))
        in_one_go = model.tokenize(whole)
        short.setattr(vocabulary, "LONG", 0)  # as texts of megabytes are cut
        short.setattr(vocabulary, "_MANY", 2)
        assert model.tokenize(whole) == in_one_go, name


def check_special(model, name):
    """Checks special tokens in a message's text. Returns how many were tried."""
    special = {token for token in range(model.n_vocab) if model.is_unseen(token)}
    words = [word for token in sorted(special) if len(word := model.written(token)) > 2][:12]
    composer = Composer(model, None)
    marks = {}
    for word in ["", *words]:
        [piece] = composer.pieces(composer.first([Message("user", f"a {word} b")]), [])
        marks[word] = [token for token in piece.tokens if token in special]
    assert all(found == marks[""] for found in marks.values()), (name, marks)
    return len(words)


_REAL = [name for name, shape in SHAPES.items() if shape.released]


@pytest.mark.parametrize("name", [_REAL[0], *whole(*_REAL[1:])])
def test_shapes_have_the_vocabularies_and_the_words_of_their_families(native, released, tmp_path, name):
    shape, file = SHAPES[name], tmp_path / "v.gguf"
    spec, found = shape.text(), shape.released
    made = found.read(released, spec.vocab.size)
    write_gguf(file, layers.attention_meta(spec) | dict(spec.meta) | made.meta, [])
    with opened(file) as model:
        assert model.n_vocab == made.size >= spec.vocab.size
        for text, tokens in references(released / f"ggml-vocab-{found.vocabulary}.gguf"):
            assert model.tokenize(text, special=False) == tokens, text
        for word in found.specials:
            [token] = model.tokenize(word, special=True)
            assert model.written(token) == word and model.is_unseen(token)
            assert len(model.tokenize(word, special=False)) > 1


# ---------------------------------------------------------------------------------------------------- templates


def user(text):
    return {"role": "user", "content": text}


ANSWER, SYSTEM = {"role": "assistant", "content": "A cat."}, {"role": "system", "content": "Be kind."}
PARAMETERS = {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks up.", "parameters": PARAMETERS}}]
CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"what": "x"}}}
RESULT = {"role": "tool", "content": "found", "tool_call_id": "call00000", "name": "look"}
CASES = {
    "a question": ([user("Hi there")], {}),
    "a system text": ([SYSTEM, user("Hi there")], {}),
    "turns": ([user("Hi"), ANSWER, user("And now?")], {}),
    "a picture": ([user(f"{MARKER}\nWhat is this?")], {}),
    "pictures": ([SYSTEM, user(f"Image 1: {MARKER}\nImage 2: {MARKER}\nWhat?"), ANSWER, user("Why?")], {}),
    "tools": ([user("Look it up")], {"tools": TOOLS}),
    "a result": (
        [user("Look it up"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT],
        {"tools": TOOLS},
    ),
    "no thinking": ([user("Hi there")], {"enable_thinking": False}),
}
# templates that jinja2 cannot render, or renders differently from llama.cpp: reason
OTHERWISE = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "wants tools in every prompt",
    "Kimi-K2-Instruct": "changes a list, which transformers' sandbox refuses",
    "Kimi-K2-Thinking": "changes a list",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "wants tools in every prompt",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "wants tools in every prompt",
    "fireworks-ai-llama-3-firefunction-v2": "wants tools as `functions`",
    "google-gemma-2-2b-it": "knows no system text, which llama.cpp puts before the question",
    "google-gemma-4-31B-it-interleaved": "wants results inside of the call's message",
    "llama-cpp-deepseek-r1": "writes a generator as JSON",
    "meetkai-functionary-medium-v3.1": "writes JSON that jinja2 escapes",
    "meetkai-functionary-medium-v3.2": "wants arguments as text",
    "meta-llama-Llama-3.1-8B-Instruct": "gives a date of its own, which llama.cpp sets to today's",
    "meta-llama-Llama-3.3-70B-Instruct": "gives a date of its own",
}


class Generation(Extension):
    """transformers' mark around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 wants it

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def by_jinja2(source):
    def refuse(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, **form):
        return json.dumps(value, ensure_ascii=ensure_ascii, **form)

    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    found.filters["tojson"] = tojson
    found.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    known = {"bos_token": BOS, "eos_token": EOS, "tools": None, "enable_thinking": True, "add_generation_prompt": True}
    return found.from_string(source, known)


def told_by_kvedge(template, messages):
    """Returns messages as the server makes them, and whether the template gets calls unchanged."""
    fields = ("tool_calls", "tool_call_id", "name")
    told = [Message(m["role"], m["content"], [], {name: m[name] for name in fields if name in m}) for m in messages]
    if not any(message.fields for message in told):
        return told, True
    change = tool_adapter(template, MARKER)
    return change(told), change is list


def test_prompts_are_what_transformers_writes(native, released, monkeypatch, pytestconfig):
    monkeypatch.setattr(sandbox, "can_start", lambda: False)  # no child process for each template
    sources = {path.stem: path.read_text(encoding="utf-8") for path in released.glob("templates/*.jinja")}
    assert len(sources) == N_TEMPLATES
    n, every = 0, 1 if pytestconfig.getoption("all") else 2
    for name, source in sorted(sources.items())[::every]:
        template = ChatTemplate(source, BOS, EOS)
        for case, (messages, values) in CASES.items():
            told, known = told_by_kvedge(template, messages)
            written = template.first(told, MARKER, values)
            assert all(word in written for word in ("Hi", "Look") if word in messages[0]["content"]), (name, case)
            n += known
            if known and name not in OTHERWISE:
                expected = by_jinja2(source).render(messages=copy.deepcopy(messages), **values)
                assert written == expected, (name, case)
    assert n == N_WRITTEN or (every > 1 and n > N_WRITTEN // 3)


def test_parts_of_content_are_made_where_a_template_loops_over_them(native):
    """SmolVLM's template iterates over the parts of a message: a text without parts would be lost."""
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] | capitalize }}"
        "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
        "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )
    template = ChatTemplate(source, BOS, EOS)
    asked = [Message("user", f"{MARKER}\nWhat is this?")]
    assert template.first(asked, MARKER) == (
        f"{BOS}User: {MARKER}\nWhat is this?<end_of_utterance>\nAssistant:"
    )
    later = [*asked, Message("assistant", "A cup."), Message("user", "Why?")]
    assert template.following(later, MARKER) == "<end_of_utterance>\nUser: Why?<end_of_utterance>\nAssistant:"
