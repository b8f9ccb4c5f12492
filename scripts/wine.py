"""An empty Windows of Wine in a temporary folder, for programs that run here. It is removed afterwards."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

QUIET = {
    "WINEDEBUG": "-all,err+module",  # report only missing libraries
    "WINEDLLOVERRIDES": "mscoree,mshtml,winemenubuilder.exe=;winedbg.exe=d",  # no installers, no debugger after a crash
    "LC_ALL": "C.UTF-8",  # allow any letter in file names
}


@contextlib.contextmanager
def windows(launcher: str) -> Iterator[None]:
    """Sets the environment to a new Windows: programs started by `launcher` (wine64, wine) inside the `with` use it."""
    before = dict(os.environ)
    # Wine can still delete files while the folder is removed
    with tempfile.TemporaryDirectory(prefix="kvedge-wine-", ignore_cleanup_errors=True) as folder:
        os.environ.update(QUIET, WINEPREFIX=folder)
        try:
            # without this, the first program would wait for the setup
            subprocess.run([launcher, "wineboot.exe", "--init"], capture_output=True, check=False)
            yield
        finally:
            _stop()
            os.environ.clear()
            os.environ.update(before)


def _stop() -> None:
    """Ends Wine's server, which otherwise stays for a while and holds files."""
    server = next(filter(None, map(shutil.which, ("wineserver", "/usr/lib/wine/wineserver64"))), None)
    if server:
        subprocess.run([server, "-k"], capture_output=True, check=False)
        subprocess.run([server, "-w"], capture_output=True, check=False)
