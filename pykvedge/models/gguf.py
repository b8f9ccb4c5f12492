"""Reads GGUF headers, to refuse a bad file with a clear message before llama.cpp opens it.

Values of long arrays are skipped, tensor data is never touched: a header with a vocabulary of 150 000 tokens takes a
tenth of a second. Format: docs/gguf.md of ggml, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from pykvedge.errors import ModelError
from pykvedge.system.files import require_file

Scalar = int | float | bool | str


@dataclass(frozen=True)
class Tensor:
    """A tensor: its shape (fastest dimension first), and its number of a ggml type."""

    shape: tuple[int, ...]
    type: int
    offset: int  # bytes from the start of the data section


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file."""

    path: Path
    values: Mapping[str, Scalar]  # metadata without arrays
    arrays: Mapping[str, int]  # metadata arrays: lengths
    lists: Mapping[str, list[Scalar]]  # metadata arrays of at most 1024 numbers: values
    types: Mapping[str, int]  # GGUF's type number of each value; for an array, of its elements
    tensors: Mapping[str, Tensor]
    file_size: int
    data_start: int = 0  # start of the tensors' data section, in bytes
    distinct_tokens: int = 0  # number of different texts in the vocabulary
    other_bytes: int = 0  # size of the model's other files, if the model is split

    @property
    def architecture(self) -> str:
        """general.architecture, or ""."""
        return str(self.values.get("general.architecture", ""))


# type number of a metadata value -> struct format
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LIST = 1024
TOKENS = "tokenizer.ggml.tokens"
_LIMIT = 1 << 24  # the largest accepted count; no real header comes near it


class _Reader:
    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data, self.at = data, 0
        self.distinct_tokens = 0

    def scalar(self, form: str) -> Scalar:
        end = self.at + struct.calcsize("<" + form)
        if end > len(self.data):
            raise EOFError("a value is beyond the end of the file")
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at = end
        return value

    def count(self, what: str) -> int:
        n = int(self.scalar("Q"))
        if n > _LIMIT:
            raise ValueError(f"{what} of {n} is too large")
        return n

    def string(self) -> str:
        return self._bytes().decode("utf-8", "replace")

    def _bytes(self) -> bytes:
        n = self.count("a string length")
        if self.at + n > len(self.data):
            raise EOFError("a string is beyond the end of the file")
        self.at += n
        return self.data[self.at - n : self.at]

    def array(self, key: str) -> tuple[int, int, list[Scalar] | None]:
        """Reads the type and the length of an array, and the values of a short array of numbers."""
        start = self.at
        kind, n = int(self.scalar("I")), self.count("an array length")
        if kind == _STRING and key == TOKENS:
            # llama.cpp reads a text up to its first NUL, and names an empty text by its number
            texts = [self._bytes().partition(b"\0")[0] for _ in range(n)]
            self.distinct_tokens = len({text or b"[EMPTY_%d]" % i for i, text in enumerate(texts)})
        elif kind == _STRING:
            read, data, at, last = struct.Struct("<Q").unpack_from, self.data, self.at, len(self.data) - 8
            for _ in range(n):
                if at > last:
                    raise EOFError("an array is beyond the end of the file")
                at += 8 + read(data, at)[0]
            self.at = at
        elif kind in _SCALARS:
            self.at += n * struct.calcsize("<" + _SCALARS[kind])
        else:
            raise ValueError(f"an array has the unknown type {kind}")
        if self.at > len(self.data):
            raise EOFError("an array is beyond the end of the file")
        if kind == _STRING or n > _LIST:
            return kind, n, None
        return kind, n, list(struct.unpack_from(f"<{n}{_SCALARS[kind]}", self.data, start + 12))


def read_header(path: str | os.PathLike[str]) -> Header:
    """Reads and checks the header of a GGUF file, and checks that the file is long enough for its tensors.

    The first file of a split model is read with the other files. Raises ModelError with a one-line reason.
    """
    first = _read_file(Path(path))
    return joined([first, *map(_read_file, _others(first))])


def _others(first: Header) -> list[Path]:
    count, end = first.values.get("split.count", 1), "-00001-of-{:05}.gguf"
    if not isinstance(count, int) or count < 2 or first.values.get("split.no"):
        return []
    name, end = first.path.name, end.format(count)
    if not name.endswith(end):
        raise ModelError(f"{first.path} is the first of {count} files, so its name must end in {end}; rename the file")
    return [first.path.with_name(f"{name[: -len(end)]}-{i:05}-of-{count:05}.gguf") for i in range(2, count + 1)]


def joined(parts: Sequence[Header]) -> Header:
    """Makes one header of a model's files, in their order: the first file's header with the tensors of all files.

    Offsets count as if the files, padded to multiples of 32 bytes, followed each other.
    """
    first, tensors, at = parts[0], dict[str, Tensor](), 0
    for part in parts:
        shift = at + part.data_start - first.data_start
        tensors |= {name: replace(tensor, offset=tensor.offset + shift) for name, tensor in part.tensors.items()}
        at += -(-part.file_size // 32) * 32
    return replace(first, tensors=tensors, other_bytes=sum(part.file_size for part in parts[1:]))


def _read_file(path: Path) -> Header:
    try:
        require_file(path)
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return _read(path, b"", 0)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, data, len(data))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None


def header_of(name: Path, start: bytes, size: int) -> Header | None:
    """Reads the header in the first bytes of a GGUF file. Returns None if the bytes end before the header does.

    name: the file's name in messages. size: bytes of the whole file. Raises ModelError as read_header does.
    """
    with suppress(EOFError):
        return _read(name, start, size)
    return None


def _read(path: Path, data: mmap.mmap | bytes, size: int) -> Header:
    """Reads a header. Raises ModelError; EOFError if `data` is a part of the file and ends in the header."""
    if size < 24 or data[:4] != b"GGUF"[: len(data)]:
        raise ModelError(f"{path} is not a GGUF file; give a model that was converted for llama.cpp")
    try:
        return _parse(path, data, size)
    except (ValueError, EOFError, OverflowError, struct.error) as error:
        if isinstance(error, EOFError) and len(data) < size:
            raise
        raise ModelError(f"{path} is damaged or truncated ({error}); download or convert it again") from None


def _parse(path: Path, data: mmap.mmap | bytes, size: int) -> Header:
    reader = _Reader(data)
    reader.at = 4
    version = int(reader.scalar("I"))
    if version not in (2, 3):
        raise ModelError(
            f"{path} is a GGUF file of version {version}, but kvedge reads only versions 2 and 3; "
            f"convert the model again"
        )
    n_tensors, n_values = reader.count("a tensor count"), reader.count("a metadata count")
    values: dict[str, Scalar] = {}
    arrays: dict[str, int] = {}
    lists: dict[str, list[Scalar]] = {}
    types: dict[str, int] = {}
    for _ in range(n_values):
        key, kind = reader.string(), int(reader.scalar("I"))
        types[key] = kind
        if kind == _ARRAY:
            types[key], arrays[key], found = reader.array(key)
            if found is not None:
                lists[key] = found
        elif kind == _STRING:
            values[key] = reader.string().partition("\0")[0]  # llama.cpp reads up to the NUL
        elif kind in _SCALARS:
            values[key] = reader.scalar(_SCALARS[kind])
        else:
            raise ValueError(f"metadata '{key}' has the unknown type {kind}")
    tensors: dict[str, Tensor] = {}
    for _ in range(n_tensors):
        name, n_dims = reader.string(), int(reader.scalar("I"))
        if n_dims > 4:
            raise ValueError(f"tensor '{name}' has {n_dims} dimensions, more than 4")
        shape = tuple(int(reader.scalar("Q")) for _ in range(n_dims))
        tensors[name] = Tensor(shape, int(reader.scalar("I")), int(reader.scalar("Q")))
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"the alignment {alignment} is not a power of two")
    start = -(-reader.at // alignment) * alignment
    for name, tensor in tensors.items():
        missing = start + tensor.offset + (tensor_bytes(tensor) or 0) - size
        if missing > 0:
            raise ValueError(f"tensor '{name}' ends {missing} bytes beyond the end of the file")
    return Header(path, values, arrays, lists, types, tensors, size, start, reader.distinct_tokens)


def tensor_bytes(tensor: Tensor) -> int | None:
    """Returns the bytes of a tensor's data, or None for a type that the gguf package does not know."""
    try:
        elements, block = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
    except ValueError:
        return None
    return math.prod(tensor.shape) // elements * block
