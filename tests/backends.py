"""Loads backends of ggml in workers: module files, and RPC servers."""

import ctypes
import sys

from pykvedge.native import ggml, libraries, llamacpp


def load_module(path):
    """Loads the backend in the file at path. Ends the process with an error when ggml cannot load the file."""
    llamacpp.start(verbose=False, vision=False)
    library = ctypes.CDLL(str(libraries.require_dir() / libraries.file_name("ggml")))
    library.ggml_backend_load.restype, library.ggml_backend_load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    if not library.ggml_backend_load(path.encode()):
        sys.exit(f"ggml cannot load {path}")


def prepare(job):
    """Loads the backends of a job. job: "module" is a backend's file, "rpc" is HOST:PORT,... Both keys are optional."""
    if job.get("module"):
        load_module(job["module"])
    for endpoint in (job.get("rpc") or "").split(","):
        if endpoint:
            ggml.add_server(endpoint)
