"""A pair of files is checked before it is fetched: by the beginnings of the files, which hold their headers.

The checks are those of files on the disk (models/modelfile.py). Whether it knows the architecture is asked of llama.cpp
itself, which reads the metadata of a file without its tensors, as it does to tokenise alone.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from pykvedge.errors import HubError, LibraryError, ModelError
from pykvedge.models.gguf import Header, header_of
from pykvedge.native import llamacpp

MOST_HEADER = 64 << 20  # bytes; the largest vocabularies of today take a fourth of that
_FIRST = 128 << 10
_GROWTH = 4
_N_TENSORS_AT = 8  # bytes into a GGUF file


def read_start(name: Path, size: int, fetch: Callable[[int, int], bytes]) -> tuple[Header, bytes]:
    """Fetches as much of a GGUF file's beginning as its header takes, and reads it.

    name: what messages call the file. size: of the whole, bytes. fetch(begin, end): the bytes from begin to before end.
    Raises ModelError for what is no GGUF file or has too long a header, and what `fetch` raises.
    """
    start, want = b"", _FIRST
    while True:
        want = min(want, size, MOST_HEADER)
        more = fetch(len(start), want)
        if len(start) + len(more) < want:
            raise HubError(f"{name} is shorter than the {size} bytes that the hub says; try again later")
        start += more
        header = header_of(name, start, size)
        if header is not None:
            return header, start
        if want >= MOST_HEADER:
            raise ModelError(f"{name} has a header of more than {MOST_HEADER >> 20} MiB, as no usable model has")
        want *= _GROWTH


def _metadata(start: bytes) -> bytes:
    """Makes a file of a header that has no tensors, and no other parts, which llama.cpp would look for beside it."""
    alone = start[:_N_TENSORS_AT] + struct.pack("<Q", 0) + start[_N_TENSORS_AT + 8 :]
    key, other = (struct.pack("<Q", len(name)) + name for name in (b"split.count", b"split.other"))
    return alone.replace(key, other, 1)


def check_vocabulary(header: Header, start: bytes) -> None:
    """Asks llama.cpp whether it knows the architecture and can read the vocabulary. Raises ModelError if not.

    start: the file's bytes, at least to the end of its header.
    """
    try:
        llama = llamacpp.start(False, vision=False)
    except LibraryError:  # which whoever loads the model is told
        return
    with tempfile.TemporaryDirectory(prefix="kvedge-") as folder:
        path = Path(folder, "header.gguf")
        path.write_bytes(_metadata(start))
        params = llama.llama_model_default_params()
        params.vocab_only = True
        with llamacpp.collected_errors() as lines:
            handle = llama.llama_model_load_from_file(os.fsencode(path), params)
        if not handle:
            raise ModelError(f"{header.path} cannot be used: {llamacpp.reason(lines, 'llama.cpp does not say why')}")
        try:
            speaks = llama.llama_model_has_decoder(handle) and not llama.llama_model_has_encoder(handle)
            diffuses = llama.llama_model_is_diffusion(handle)
        finally:
            llama.llama_model_free(handle)
    if not speaks or diffuses:
        raise ModelError(f"{header.path} is no decoder-only language model; it cannot be used to chat")
