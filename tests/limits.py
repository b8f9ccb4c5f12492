"""Limits the size of files, as a full disk does. POSIX only."""

from contextlib import contextmanager


@contextmanager
def small_files(most):
    """Limits files of this process to `most` bytes inside the `with`."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def of_child(most):
    """Limits files of a child process to `most` bytes. Called in its preexec_fn."""
    return small_files(most).__enter__
