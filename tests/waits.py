"""Waits for another thread, process or page."""

import time


def until(question, seconds=120):
    """Calls question() until its answer is true, and returns the answer. Fails the test after `seconds`."""
    end = time.monotonic() + seconds
    while not (answer := question()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return answer
