"""Work of several threads at the same time."""

import threading


def in_threads(*steps):
    """Runs them at the same time, and raises what any of them raised."""
    failures = []

    def guarded(step):
        try:
            step()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
