"""A running image encoder: its progress, and its stop when the image is no longer wanted."""

import threading

import pytest

import pykvedge
from pykvedge import CancelledError, Picture, Sampling

PICTURES = [Picture(f"{n}", n, n, bytes(range(251)) * (n * n * 3 // 251) + bytes(n * n * 3 % 251)) for n in (84, 112)]
ENCODING = "encoding image {} of 2"


def ask(session):
    return session.ask("What are these?", PICTURES, Sampling(max_tokens=8)).read()


@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
def test_progress_goes_through_every_image(tiny, native, kind):
    seen = []
    with tiny(kind).session(pykvedge.plan("full"), progress=lambda *x: seen.append(x)) as session:
        ask(session)
        for i in (0, 1):
            shares = [share for what, share in seen if what == ENCODING.format(i + 1)]
            assert shares[0] == i / 2 < shares[1] <= shares[-1] <= (i + 1) / 2 and shares == sorted(shares)


@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
@pytest.mark.parametrize("error", [CancelledError, KeyboardInterrupt])
def test_an_encoder_is_stopped_between_its_layers(tiny, native, kind, error):
    """An image that was not fully encoded is never used."""
    cancel, layers, on = threading.Event(), [], True

    def soon(what, share):
        if on and what == ENCODING.format(2) and share > 0.5:
            layers.append(share)
            if error is KeyboardInterrupt:
                raise KeyboardInterrupt
            cancel.set()

    with tiny(kind).session(pykvedge.plan("full")) as session:
        expected = ask(session)
    with tiny(kind).session(pykvedge.plan("full"), cancel=cancel, progress=soon) as session:
        with pytest.raises(error):
            ask(session)
        assert len(layers) == 1 and layers[0] < 1.0 and not session.messages
        cancel.clear()
        on = False
        assert ask(session) == expected
