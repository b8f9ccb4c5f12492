"""Files that cannot grow beyond so many bytes, as on a full disk. POSIX alone."""

from contextlib import contextmanager


@contextmanager
def small_files(most):
    """Of this process, meanwhile."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def of_child(most):
    """Of a program that is started with this as its preexec_fn."""
    return small_files(most).__enter__
