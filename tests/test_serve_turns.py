"""Order of requests: a short question does not wait for a long prompt; large requests are refused at once."""

import threading

import pytest

import pykvedge
from pykvedge import ContextError, Message, Sampling
from pykvedge.serve.job import Done, Failed, Request, Step
from pykvedge.serve.wire import chat_request


@pytest.fixture
def engine(scheduled):
    return scheduled(slots=3, n_ctx=16384, memory=256 << 20)


def request(text):
    return Request([Message("user", text)], pykvedge.plan("full"), Sampling(max_tokens=1, temp=0.0))


def test_short_prompts_pass_a_long_one_and_do_not_hold_it(engine):
    """The long prompt is being read when short ones come: they are answered first, and then it goes on."""
    order, begun, over = [], threading.Event(), threading.Semaphore(0)

    def ask(name, text):
        def take(event):
            if name == "long" and isinstance(event, Step) and 0 < event.share < 1:
                begun.set()
            if isinstance(event, (Done, Failed)):
                order.append((name, type(event)))
                over.release()

        return engine.submit(request(text), take)

    ask("long", "red " * 3600)
    assert begun.wait(60)
    for i in range(3):
        ask(f"short {i}", f"What is number {i}?")
    for _ in range(4):
        assert over.acquire(timeout=120)
    assert order[-1] == ("long", Done) and len(order) == 4 and all(kind is Done for _, kind in order)


def test_more_tokens_than_a_conversation_holds_are_counted_no_further(engine, monkeypatch):
    """A text ten times too long is tokenised only in part, and a text a hundred times too long not at all."""
    preparer = engine.preparer
    seen, plain = [], preparer._model.tokenize

    def noted(text, special=True):
        seen.append(len(text))
        return plain(text, special)

    monkeypatch.setattr(preparer._model, "tokenize", noted)
    n_ctx = 16384
    with pytest.raises(ContextError, match=f"bytes of text exceeds the available context size .{n_ctx} tokens"):
        preparer.measured(request("x" * (n_ctx * 100)))
    assert not seen
    with pytest.raises(ContextError, match=f"tokens or more exceeds the available context size .{n_ctx}"):
        preparer.measured(request("x" * (n_ctx * 10)))
    assert 0 < sum(seen) < 3 * n_ctx
    fits = preparer.measured(request("red " * (n_ctx // 5)))  # a shorter text is tokenised whole, once
    assert fits.n_text == 4 * (n_ctx // 5)


def test_large_pictures_are_not_written_again():
    """Large URLs of a translated request stay unchanged, whatever their text is."""
    large = "data:image/png;base64," + "A" * 100_000
    urls = [large, "aside:0", "data:small", large + "=", "aside:7"]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls[:3]]
    content += [{"type": "image_url", "image_url": url} for url in urls[3:]]
    said = [{"role": "user", "content": "x"}, {"role": "user", "content": content}]
    chat = chat_request({"messages": said, "max_tokens": None})
    assert [part.url for part in chat.messages[1].content] == urls and chat.messages[0].content == "x"
