"""/set changes the sampling of a conversation's answers."""

import pytest

import pykvedge
from pykvedge import Sampling, UsageError
from pykvedge.cli.progress import Display
from pykvedge.cli.talk import commands
from pykvedge.cli.talk.chat import Chat, Style


@pytest.fixture
def chat(tiny, native):
    with tiny("llama").session() as session:
        yield Chat(session, Sampling(max_tokens=20), Style(), Display(enabled=False))


def typed(chat, line, capsys):
    """Returns the output of /set."""
    capsys.readouterr()
    commands.run(chat, f"/set {line}".strip())
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("min_p 0.1", "min_p", 0.1),
        ("typical_p=0.5", "typical_p", 0.5),
        ("repeat_penalty = 1.5", "repeat_penalty", 1.5),
        ("frequency_penalty -1", "frequency_penalty", -1.0),
        ("presence_penalty 2", "presence_penalty", 2.0),
        ("repeat_last_n 0", "repeat_last_n", 0),
        ("logit_bias 7=-inf see=2.5", "logit_bias", {7: float("-inf"), "see": 2.5}),
        ("seed random", "seed", None),
        ('grammar root ::= "yes" | "no"', "grammar", 'root ::= "yes" | "no"'),
        ('json_schema {"enum": [1, "a = b"]}', "json_schema", '{"enum": [1, "a = b"]}'),
        ("regex (yes|no) *", "regex", "(yes|no) *"),
        ("stop The end.", "stop", ("The end.",)),
        (r"stop \n\nAnd", "stop", ("\n\nAnd",)),
    ],
)
def test_a_setting_is_changed(chat, capsys, line, name, value):
    said = typed(chat, line, capsys)
    assert getattr(chat.sampling, name) == value and chat.sampling.max_tokens == 20
    assert said.startswith(f"{name} ") and said.endswith(", from the next message on\n")
    shown = said.removesuffix(", from the next message on\n")
    assert f"  {shown}\n" in typed(chat, "", capsys)
    before = chat.sampling
    typed(chat, shown, capsys)  # the listed form can be typed
    assert chat.sampling == before


def test_what_is_taken_away(chat, capsys):
    typed(chat, "logit_bias 7=1", capsys)
    assert "none" in typed(chat, "logit_bias none", capsys) and chat.sampling.logit_bias == {}
    typed(chat, "stop END", capsys)
    assert "none" in typed(chat, "stop none", capsys) and chat.sampling.stop == ()
    for name, text in (("grammar", 'root ::= "a"'), ("json_schema", '{"const": 1}'), ("regex", "a+")):
        typed(chat, f"{name} {text}", capsys)
        assert "none" in typed(chat, f"{name} none", capsys) and getattr(chat.sampling, name) is None


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("critical l1", "critical", "l1"),
        ("critical_half=free", "critical_half", "free"),
        ("text_prior true", "text_prior", True),
        ("sinks 2", "sinks", 2),
        ("recent 0.1", "recent", pykvedge.plan("h2o", 0.3, recent=0.1).recent),
        ("recent auto", "recent", None),
    ],
)
def test_what_is_kept_is_changed_as_the_options_do(chat, capsys, line, name, value):
    method = "criticalkv" if name == "critical_half" else "snapkv"
    commands.run(chat, f"/method {method} 0.3")
    said = typed(chat, line, capsys)
    plan = chat.session.plan
    assert plan == pykvedge.plan(method, 0.3, **{name: value})
    shown = said.removesuffix(", from the next message on\n")
    assert f"  {shown}\n" in typed(chat, "", capsys)
    typed(chat, shown, capsys)  # the listed form can be typed
    assert chat.session.plan == plan and chat.session.ask("What is there? " * 9).read() is not None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("critical l3", "unknown critical 'l3'"),
        ("text_prior maybe", "text_prior must be true or false"),
        ("sinks 1.5", "sinks must be a whole number"),
        ("recent many", "recent must be a ratio"),
        ("min_p", "needs a name and a value"),
        ("min_p 0.1 0.2", "needs a name and a value"),
        ("min_p 3", "min_p must lie between"),
        ("repeat_last_n 1.5", "repeat_last_n must be a whole number"),
        ("logit_bias 7", "ID=BIAS"),
        ("grammar nowhere.gbnf", "nowhere.gbnf cannot be read"),
        ("json_schema {", "not JSON"),
        ("minp 1", "did you mean 'min_p'"),
    ],
)
def test_what_cannot_be_set(chat, capsys, line, why):
    before = chat.sampling, chat.session.plan
    with pytest.raises(UsageError, match=why):
        typed(chat, line, capsys)
    assert (chat.sampling, chat.session.plan) == before


def test_critical_is_refused_with_scores_that_it_cannot_weigh(chat, capsys):
    commands.run(chat, "/method keydiff 0.3")
    with pytest.raises(UsageError, match="scorer 'keydiff'"):
        typed(chat, "critical l1", capsys)


def test_an_answer_follows_what_was_set(chat, capsys, tmp_path):
    (tmp_path / "g.gbnf").write_text('root ::= "yes" | "no"')
    typed(chat, f"grammar {tmp_path / 'g.gbnf'}", capsys)
    chat.answer("Hello")
    assert capsys.readouterr().out in ("yes\n", "no\n")


def test_settings_hold_for_the_next_message(chat, capsys):
    def answered():
        chat.clear()
        chat.answer("Hello")
        return capsys.readouterr().out

    plain = answered()
    typed(chat, "frequency_penalty 5", capsys)
    typed(chat, f"logit_bias {chat.session.model.tokenize(plain.split()[0], special=False)[0]}=-inf", capsys)
    assert answered() != plain
    typed(chat, "frequency_penalty 0", capsys)
    typed(chat, "logit_bias none", capsys)
    assert answered() == plain


def test_an_answer_that_cannot_be_shown_is_ended(chat, monkeypatch):
    def full(*_, **__):
        raise OSError("no room")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no room"):
        patched.setattr("builtins.print", full)
        chat.put("Hello", [])
    assert [message.role for message in chat.session.messages] == ["user", "assistant"]
