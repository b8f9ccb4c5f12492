"""Chat templates: first prompts, later turns, and difficult templates."""

import pytest

from pykvedge import ModelError, Picture, UsageError
from pykvedge.models.composer import Composer
from pykvedge.models.prompt import ChatTemplate, Message, check_places, places

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
FORGETFUL = "{{ messages[-1].content }}|"  # shows only the last message
PICTURE = Picture("a.png", 1, 1, b"abc")
USER = Message("user", "What is this?", [PICTURE])
CHAT = [USER, Message("assistant", " A cup. "), Message("user", "And that?", [PICTURE, PICTURE])]


def template(source):
    return ChatTemplate(source, "<s>", "</s>")


class Words:
    """A vocabulary without special tokens."""

    adds_bos = False

    def __init__(self, template):
        self.chat_template = lambda: template
        self.special_text = lambda which: ""
        self.special_words = lambda text: []


def prompt(source, *messages):
    return Composer(Words(source), None).first([Message(role, text) for role, text in messages]).text


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
    assert template(None).following(CHAT, "<img>") == "</s>USER: Image 2: <img>\nImage 3: <img>\nAnd that? ASSISTANT:"


@pytest.mark.parametrize("source", [CHATML, NO_SYSTEM, None])
def test_first_and_following_make_the_whole_conversation(source):
    t = template(source)
    whole = t.first(CHAT, "<img>")
    answer = CHAT[1].text.strip() if source else CHAT[1].text
    assert whole == t.first(CHAT[:1], "<img>") + (" " if not source else "") + answer + t.following(CHAT, "<img>")


def test_a_template_without_system_role_gets_its_text_in_the_first_message():
    text = template(NO_SYSTEM).first([Message("system", "Be brief."), USER], "<img>")
    assert text.startswith("<|im_start|>user\nBe brief.\n<img>\nWhat is this?")


def test_a_template_that_forgets_earlier_turns():
    assert template(FORGETFUL).following(CHAT, "<img>") == "Image 2: <img>\nImage 3: <img>\nAnd that?|"


def test_what_the_user_writes_is_no_template():
    text = template(CHATML).first([Message("user", "{{ 7 * 7 }} {% for %}")], "<img>")
    assert "{{ 7 * 7 }} {% for %}" in text


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ unfinished", "{{ raise_exception('never') }}", "{{ no_function() }}"]
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


def test_images_are_numbered_through_the_conversation():
    picture, t = PICTURE, template(CHATML)
    messages = [
        Message("user", "a", [picture, picture]),
        Message("assistant", "b"),
        Message("user", "c", [picture]),
        Message("assistant", "d"),
        Message("user", "e", [picture, picture]),
    ]
    whole = t.first(messages, "<img>")
    assert [whole.index(f"Image {i}: <img>") for i in range(1, 6)] == sorted(
        whole.index(f"Image {i}: <img>") for i in range(1, 6)
    )
    assert "Image 6" not in whole and whole.count("<img>") == 5
    assert "Image 3: <img>\nc" in t.following(messages[:3], "<img>") and "Image 1" not in t.following(messages, "<img>")


def test_pictures_stand_where_the_text_says():
    two = Message("user", r"From <image> to <image>, not \<image>.", [PICTURE, PICTURE])
    assert two.content("<img>") == two.content("<img>", [PICTURE] * 3) == "From <img> to <img>, not <image>."
    assert Message("user", r"No \<image> here", [PICTURE]).content("<img>") == "<img>\nNo <image> here"
    assert Message("user", r"No \<image> here").content("<img>", [PICTURE]) == "No <image> here"
    # image marks in a model's text are only text
    assert Message("assistant", r"\<image> <image>").content("<img>") == r"\<image> <image>"
    assert places(r"<image>\<image><image>") == 2


@pytest.mark.parametrize(
    ("text", "n", "says"),
    [
        ("<image>?", 0, r"1 place for images \(<image>\), and no images were given"),
        ("<image> <image>", 1, r"2 places .* and 1 image was given"),
        ("<image>", 2, r"1 place .* and 2 images were given; to write the word <image> itself, write \\<image>"),
    ],
)
def test_places_and_pictures_must_agree(text, n, says):
    with pytest.raises(UsageError, match=says):
        check_places(text, n)
    check_places(text, text.count("<image>"))
    check_places(r"\<image>", n)


LOOP = "{% for m in messages %}{% if CASE %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
ASKED, LONG = ("user", "Why?"), ("user", "What is in the picture, and where does it come from?")
SYSTEM, ANSWER = ("system", "Be brief."), ("assistant", "Yes.")


@pytest.mark.parametrize(
    ("source", "lost"),
    [
        ("You are here. Why?", "user"),
        (LOOP.replace("CASE", "m.role != 'user'"), "user"),
        (LOOP.replace("CASE", "m.content == '?'"), "user"),
        (LOOP.replace("CASE", "m.role == 'user' or m.content == '?'"), "system"),
    ],
)
def test_a_text_that_the_template_drops_is_an_error(source, lost):
    for question in (ASKED, LONG, ("user", "Be brief.")):
        with pytest.raises(ModelError, match=f"drops the text of the {lost} message"):
            prompt(source, *[SYSTEM] * (lost == "system"), question)
    only_first = "{{ messages[0].content }}"
    assert prompt(only_first, LONG) == LONG[1]
    with pytest.raises(ModelError, match="drops the text of the user message"):
        prompt(only_first, LONG, ANSWER, LONG)


@pytest.mark.parametrize(
    "form", ["trim", "upper", "tojson", "replace('?', '!')", "replace('/brief', '') | trim"]
)
def test_a_text_that_the_template_changes_is_no_error(form):
    source = LOOP.replace("CASE", "true").replace("m.content", f"m.content | {form}")
    for text in ("?", '  "Why"\n\n', "/brief", LONG[1] + "\n<b> ü", ""):
        assert prompt(source, ("system", text), ("user", text)).count("user: ") == 1


def test_a_later_system_message_that_the_template_drops_is_written_in_a_user_message():
    first_only = LOOP.replace("CASE", "m.role != 'system' or loop.first")
    told = [SYSTEM, ASKED, ANSWER, ("system", "Be \\<image> polite."), ASKED]
    assert prompt(first_only, *told).endswith("assistant: Yes.\nuser: Be \\<image> polite.\nWhy?\n")
    assert prompt(first_only, *told).startswith("system: Be brief.\nuser: Why?\n")
    assert "system: Be \\<image> polite." in prompt(LOOP.replace("CASE", "true"), *told)


def test_what_a_template_makes_of_an_answer_does_not_begin_the_next_one():
    source = "{% for m in messages %}{{ m.content | upper }}|{% endfor %}"
    assert prompt(source, ASKED, ("assistant", "Because")) == "WHY?|Because"
