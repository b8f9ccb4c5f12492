"""Chat templates: first prompts, what follows in later turns, and templates that are difficult."""

from __future__ import annotations

import pytest

from pykvedge.errors import ModelError
from pykvedge.images import Picture
from pykvedge.prompt import ChatTemplate, Message

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
FORGETFUL = "{{ messages[-1].content }}|"  # shows the last message only
PICTURE = Picture("a.png", 1, 1, b"abc")
USER = Message("user", "What is this?", [PICTURE])
CHAT = [USER, Message("assistant", " A cup. "), Message("user", "And that?", [PICTURE, PICTURE])]


def template(source):
    return ChatTemplate(source, "<s>", "</s>")


def test_images_come_before_the_text_of_their_message():
    assert template(CHATML).first([USER], "<img>") == (
        "<|im_start|>user\n<img>\nWhat is this?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_model_without_a_template_is_spoken_to_as_llava_1_5():
    text = template(None).first([USER], "<img>")
    assert text.startswith("<s>A chat between a curious human") and text.endswith(
        "USER: <img>\nWhat is this? ASSISTANT:"
    )
    assert template(None).first([Message("system", "Be brief."), USER], "<img>").startswith("<s>Be brief. USER:")
    assert template(None).following(CHAT, "<img>") == "</s>USER: Image 1: <img>\nImage 2: <img>\nAnd that? ASSISTANT:"


@pytest.mark.parametrize("source", [CHATML, NO_SYSTEM, None])
def test_first_and_following_make_the_whole_conversation(source):
    t = template(source)
    whole = t.first(CHAT, "<img>")
    answer = CHAT[1].text.strip() if source else CHAT[1].text
    assert whole == t.first(CHAT[:1], "<img>") + (" " if not source else "") + answer + t.following(CHAT, "<img>")


def test_a_template_without_system_role_gets_its_text_in_the_first_message():
    text = template(NO_SYSTEM).first([Message("system", "Be brief."), USER], "<img>")
    assert text.startswith("<|im_start|>user\nBe brief.\n\n<img>\nWhat is this?")


def test_a_template_that_forgets_earlier_turns():
    assert template(FORGETFUL).following(CHAT, "<img>") == "Image 1: <img>\nImage 2: <img>\nAnd that?|"


def test_what_the_user_writes_is_no_template():
    text = template(CHATML).first([Message("user", "{{ 7 * 7 }} {% for %}")], "<img>")
    assert "{{ 7 * 7 }} {% for %}" in text


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ unfinished", "{{ raise_exception('never') }}", "{{ 1 / 0 }}", "{{ ''.x.y }}"]
)
def test_templates_that_fail_are_named(source):
    with pytest.raises(ModelError, match="chat template"):
        template(source).first([USER], "<img>")


def test_templates_run_in_a_sandbox():
    with pytest.raises(ModelError, match="chat template"):
        template("{{ messages.__class__.__mro__[1].__subclasses__() }}").first([USER], "<img>")


def test_helpers_that_templates_expect():
    source = "{{ messages[0] | tojson }} {{ strftime_now('%Y') }} {% for m in messages %}{% break %}{% endfor %}"
    assert '"role": "user"' in template(source).first([USER], "<img>")
