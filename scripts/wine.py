"""A Windows of Wine's own for programs that are run here: empty, in a temporary folder, gone afterwards."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

QUIET = {
    "WINEDEBUG": "-all,err+module",  # nothing but the names of libraries that are missing
    "WINEDLLOVERRIDES": "mscoree,mshtml,winemenubuilder.exe=;winedbg.exe=d",  # no installers, no debugger after a crash
    "LC_ALL": "C.UTF-8",  # any letter in the name of a file
}


@contextlib.contextmanager
def windows(launcher: str) -> Iterator[None]:
    """Gives this environment such a Windows: programs that `launcher` (wine64, wine) starts meanwhile run in it."""
    before = dict(os.environ)
    # what Wine has just let go of may vanish while the folder is removed
    with tempfile.TemporaryDirectory(prefix="kvedge-wine-", ignore_cleanup_errors=True) as folder:
        os.environ.update(QUIET, WINEPREFIX=folder)
        try:
            # made here, or the first program would wait for it
            subprocess.run([launcher, "wineboot.exe", "--init"], capture_output=True, check=False)
            yield
        finally:
            _stop()
            os.environ.clear()
            os.environ.update(before)


def _stop() -> None:
    """Ends Wine's server, which stays on for a while and holds files."""
    server = next(filter(None, map(shutil.which, ("wineserver", "/usr/lib/wine/wineserver64"))), None)
    if server:
        subprocess.run([server, "-k"], capture_output=True, check=False)
        subprocess.run([server, "-w"], capture_output=True, check=False)
