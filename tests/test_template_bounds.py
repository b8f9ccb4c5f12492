"""Chat templates that loop, allocate or nest without end are stopped; other templates give the usual text."""

import gc

import psutil
import pytest
from modelgen import tokens
from modelgen.text import TextSpec, text_model
from modelgen.writer import write_gguf
from waits import until

from pykvedge.errors import ModelError
from pykvedge.models import sandbox
from pykvedge.models.prompt import FALLBACK, MAX_SOURCE, ChatTemplate, Message, is_plain
from pykvedge.models.template_worker import MAX_OUTPUT, NativeTemplate

LOOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MANY = "{% for i in range(99999) %}"
HOSTILE = {
    "loops in loops": MANY * 3 + "{% endfor %}" * 3,
    "a long list": "{{ range(9999999999) }}",
    "a long text, bit by bit": (
        "{% set ns = namespace(x='a') %}" + MANY + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
    ),
    "a long text of sums": "{% set a = 'aaaaaaaa' %}" + "{% set a = a + a %}" * 40 + "{{ a }}",
    "a wide field": "{{ '%9999999999d' % 1 }}",
    "a wide margin": "{{ 'a' | center(9999999999) }}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a loop that calls itself": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "much output": MANY + "{{ 'a' * 1000 }}{% endfor %}",
    "brackets": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "lists": "{{ " + "[" * 20_000 + "]" * 20_000 + " }}",
    "conditions": "{% if a %}" * 5000 + "{% endif %}" * 5000,
    "a large template": "a" * (MAX_SOURCE + 1),
    "digits": "{{ " + "9" * 100_000 + " }}",
}
LIKE_OTHERS = ("a long list", "a long text, bit by bit", "a wide margin", "a loop that calls itself", "lists", "digits")
USER = [Message("user", "Hello")]


@pytest.mark.parametrize(
    "source",
    [pytest.param(s, id=name, marks=pytest.mark.whole if name in LIKE_OTHERS else ()) for name, s in HOSTILE.items()],
)
def test_a_template_without_end_is_ended(source, monkeypatch, children):
    monkeypatch.setattr(sandbox, "PATIENCE", 1.0)
    before = psutil.Process().memory_info().rss
    with pytest.raises(ModelError, match=r"chat template (fails|cannot be read)") as failed:
        ChatTemplate(source, "<s>", "</s>").first(USER, "")
    assert len(str(failed.value)) < 1200
    assert psutil.Process().memory_info().rss - before < 200 << 20
    del failed
    gc.collect()
    until(lambda: not children())  # a thread ends dropped objects


def test_output_without_end_of_a_plain_template_is_ended():
    template = ChatTemplate("{{ messages[0].content }}" * 100, "", "")
    with pytest.raises(ModelError, match="its output has more than"):
        template.first([Message("user", "a" * (MAX_OUTPUT // 50))], "")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (HOSTILE["a macro that calls itself"], ("chat template fails", "the process of the template ended")),
        ("Hi there, Hi.", ("chat template drops the text of the user message; use another model file",)),
    ],
)
def test_chat_says_so_in_one_line(kvedge, tmp_path, source, says):
    path = tmp_path / "m.gguf"
    vocabulary = tokens.spm(512, template=source)
    write_gguf(path, *text_model(TextSpec("llama", vocabulary, 2, 4, 2, 32, 128, 2048)))
    kvedge("chat", "--model", path, "Hi").failed(1, *says)


PLAIN = (
    FALLBACK,
    tokens.VICUNA,
    tokens.CHATML,
    LOOP,
    "{% for m in messages[1:] %}{{ m['content'] | trim }}{% if loop.index0 % 2 == 0 %}{{ bos_token }}{% endif %}"
    "{% if m.role not in ['user', 'system'] %}{{ raise_exception('no') }}{% endif %}{% endfor %}",
)


@pytest.mark.parametrize("source", PLAIN)
def test_plain_templates_start_nothing(source, monkeypatch):
    monkeypatch.setattr(sandbox, "start", lambda _: pytest.fail("a child was started"))
    assert is_plain(source)
    ChatTemplate(source, "<s>", "</s>").first([*USER, Message("user", "again")], "")


@pytest.mark.parametrize("source", [h for h in HOSTILE.values() if len(h) < 9000], ids=lambda h: h[:20])
def test_no_other_template_is_rendered_here(source):
    assert not is_plain(source)


RICH = (
    "{% macro turn(m) %}<{{ m.role }}>{{ m.content | trim }}{% endmacro %}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ turn(m) }}{{ ns.n }}{% if m.content.startswith('x') %}"
    "{{ raise_exception('no x') }}{% endif %}{% endfor %}{{ {'a': 'ü'} | tojson }}{{ bos_token }}"
    "{% if add_generation_prompt %}!{% endif %}"
)


def test_a_rich_template_writes_in_its_child_what_it_writes_here(children):
    template = ChatTemplate(RICH, "<s>", "</s>")
    words = [Message("user", "Größe 🦙\n "), Message("assistant", "\x00\ud800"), Message("user", "<image>")]
    messages = [{"role": m.role, "content": m.text} for m in words]
    here = NativeTemplate(sandbox.chat_path(), RICH, "<s>", "</s>").write({"messages": messages})
    assert template.first(words, "") == here
    [child] = children()
    assert template.first(words[:1], "") == '<user>Größe 🦙1{"a": "ü"}<s>!'
    assert children() == [child]
    with pytest.raises(ModelError, match="no x"):
        template.first([Message("user", "x")], "")
    joined = template.first([Message("system", "Be brief"), *words[:1]], "")
    assert joined.startswith("<system>Be brief1<user>")
    del template
    gc.collect()
    until(lambda: not children())  # a thread ends dropped objects


def test_a_child_that_was_ended_is_started_again(children):
    template = ChatTemplate(RICH, "<s>", "</s>")
    first = template.first(USER, "")
    [child] = children()
    child.kill()
    child.wait()
    assert template.first(USER, "") == first
