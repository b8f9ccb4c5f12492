"""Backends of ggml's that workers use: modules, and servers."""

import ctypes
import sys

from pykvedge.native import ggml, libraries, llamacpp


def load_module(path):
    """Ends the process where ggml cannot."""
    llamacpp.start(verbose=False, vision=False)
    library = ctypes.CDLL(str(libraries.require_dir() / libraries.file_name("ggml")))
    library.ggml_backend_load.restype, library.ggml_backend_load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    if not library.ggml_backend_load(path.encode()):
        sys.exit(f"ggml cannot load {path}")


def prepare(job):
    """job: "module" is the file of a backend, "rpc" servers as HOST:PORT,...; both may be missing."""
    if job.get("module"):
        load_module(job["module"])
    for endpoint in (job.get("rpc") or "").split(","):
        if endpoint:
            ggml.add_server(endpoint)
