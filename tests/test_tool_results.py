"""Tool calls and their results, in the form that each kind of chat template gets."""

import pytest

from pykvedge.models.images import Picture
from pykvedge.models.prompt import ChatTemplate, Message
from pykvedge.models.toolresults import as_text, pictures_behind, tool_adapter

# as in Qwen2.5-VL and Qwen3-VL; a template that changes its text; three without full support of tools
INLINE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}{% endfor %}"
)
ESCAPING = INLINE.replace("{{ m.content }}", "{{ m.content | replace('<', '(') if m.role == 'tool' else m.content }}")
NONE = None
FORGETS_CALLS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
REFUSING = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}" + FORGETS_CALLS
A, B, C = (Picture(f"{name}.png", 1, 1, name.encode() * 3) for name in "abc")


def call(number, name="look"):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": {"at": number}}}


CHAT = [
    Message("user", "Is it as on <image>?", [A]),
    Message("assistant", "", fields={"tool_calls": [call("x"), call("y")]}),
    Message("tool", "One:\n<image>\n" + r"not \<image>", [B], {"tool_call_id": "x"}),
    Message("tool", "<image> is a word", [], {"tool_call_id": "y"}),
    Message("tool", "<image>", [C], {"tool_call_id": "z"}),
    Message("user", "Well?"),
]


def told(source, messages=CHAT):
    template = ChatTemplate(source, "<s>", "</s>")
    chosen = tool_adapter(template, "<img>")(messages)
    return template.first(chosen, "<img>"), [picture for message in chosen for picture in message.pictures]


def test_pictures_stand_in_the_results_where_the_template_can_write_them():
    text, pictures = told(INLINE)
    assert pictures == [A, B, C] and text.count("<img>") == 3
    assert "[tool]One:\n<img>\nnot <image>[tool]<image> is a word[tool]<img>[user]Well?" in text


def test_pictures_stand_right_behind_the_results_where_the_template_loses_them():
    text, pictures = told(ESCAPING)
    assert pictures == [A, B, C]
    assert text.partition("[tool]")[2] == (
        "One:\n(image 2)\nnot (image>[tool](image> is a word[tool](image 3)"
        "[user]Image 2: <img>\nImage 3: <img>\nWell?"
    )
    last, _ = told(ESCAPING, CHAT[:3])
    assert last.endswith("[user]Image 2: <img>")


@pytest.mark.parametrize("source", [NONE, REFUSING, FORGETS_CALLS])
def test_templates_that_know_no_tools_are_told_all_of_it_as_text(source):
    text, pictures = told(source)
    assert pictures == [A, B, C] and text.count("<img>") == 3
    assert '{"name": "look", "arguments": {"at": "x"}}\n{"name": "look"' in text
    assert (
        "Result of look: One:\n<img>\nnot <image>\nResult of look: <image> is a word\nResult: <img>\nWell?" in text
    )


@pytest.mark.parametrize("source", [INLINE, ESCAPING, NONE])
def test_what_follows_an_answer_is_not_changed_by_results_before_it(source):
    template = ChatTemplate(source, "<s>", "</s>")
    chosen = tool_adapter(template, "<img>")([*CHAT, Message("assistant", "Yes."), Message("user", "Why?")])
    after = template.following(chosen, "<img>")
    assert "Why?" in after and "Well?" not in after and "<img>" not in after


def test_the_users_turns_stay_by_turns():
    for change in (pictures_behind, as_text):
        roles = [message.role for message in change(CHAT) if message.role != "tool"]
        assert roles == ["user", "assistant", "user"]
