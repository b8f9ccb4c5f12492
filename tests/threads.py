"""Runs functions in other threads."""

from concurrent.futures import ThreadPoolExecutor


def in_threads(*steps):
    """Runs the steps at the same time. Raises the first exception of a step."""
    with ThreadPoolExecutor(len(steps)) as pool:
        for made in [pool.submit(step) for step in steps]:
            made.result()


def elsewhere(call):
    """Returns the result of a call in another thread, or its exception."""
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(call)
        return made.exception() or made.result()
