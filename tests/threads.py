"""Work of other threads."""

from concurrent.futures import ThreadPoolExecutor


def in_threads(*steps):
    """Runs them at the same time, and raises what any of them raised."""
    with ThreadPoolExecutor(len(steps)) as pool:
        for made in [pool.submit(step) for step in steps]:
            made.result()


def elsewhere(call):
    """Returns what the call returned in another thread, or what it raised."""
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(call)
        return made.exception() or made.result()
