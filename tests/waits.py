"""Waiting for what another thread, process or page does."""

import time


def until(question, seconds=120):
    """Asks until the answer is true, and returns it. Fails the test that waits longer."""
    end = time.monotonic() + seconds
    while not (answer := question()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return answer
