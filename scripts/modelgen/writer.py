"""Streams a GGUF file of random weights. A tensor is only described, never held in memory.

Values come from one pool of a few MB, read in a circle. The pool's length is prime, so a second round never lines up
with the rows of the first. Each tensor continues where the previous tensor ended.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

F32 = GGMLQuantizationType.F32
F16 = GGMLQuantizationType.F16
Q8_0 = GGMLQuantizationType.Q8_0
Q4_0 = GGMLQuantizationType.Q4_0
Q6_K = GGMLQuantizationType.Q6_K


class Int32(int):
    """An integer that is stored with a sign, because llama.cpp reads some keys as int32."""


Value = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float] | Sequence[bool]
Meta = Mapping[str, Value]

_POOL_BLOCKS = {F32: 1_048_573, F16: 1_048_573, Q8_0: 131_071, Q4_0: 262_139, Q6_K: 16_381}
_CHUNK_BYTES = 4 << 20
_FILE_TYPES = {F32: 0, F16: 1, Q4_0: 2, Q8_0: 7}  # general.file_type of a model whose weights mostly have this type


def general_meta(arch: str, kind: str, name: str, weight: GGMLQuantizationType) -> dict[str, Value]:
    return {
        "general.architecture": arch,
        "general.type": kind,
        "general.name": name,
        "general.description": "random weights: for tests and measurements, not for answers",
        "general.file_type": _FILE_TYPES[weight],
        "general.quantization_version": 2,
    }


@dataclass(frozen=True)
class Tensor:
    """One tensor to write. shape: as in NumPy. Values are normal or uniform with mean `mean`.

    `bands` splits the rows: (rows, std) in order, for example one band for each head or token.
    """

    name: str
    shape: tuple[int, ...]
    bands: tuple[tuple[int, float], ...]
    mean: float = 0.0
    type: GGMLQuantizationType = F32

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return self.elements // block * size


def fitting_type(wanted: GGMLQuantizationType, shape: Sequence[int]) -> GGMLQuantizationType:
    """Returns the wanted type, or F16 if the rows do not divide into its blocks."""
    return wanted if shape[-1] % GGML_QUANT_SIZES[wanted][0] == 0 else F16


def matrix(name: str, shape: tuple[int, ...], std: float, type_: GGMLQuantizationType) -> Tensor:
    return Tensor(name, shape, ((shape[0], std),), 0.0, fitting_type(type_, shape))


def vector(name: str, size: int | tuple[int, ...], mean: float = 0.0, std: float = 0.0) -> Tensor:
    """Returns a bias, a norm or a small kernel, in F32 as llama.cpp needs them."""
    shape = (size,) if isinstance(size, int) else size
    return Tensor(name, shape, ((shape[0], std),), mean, F32)


@functools.lru_cache(maxsize=4)
def _random(type_: GGMLQuantizationType, seed: int) -> tuple[np.ndarray, float]:
    """Returns random numbers, or blocks [n, bytes], of a type, and their standard deviation at a block scale of 1.

    Cached, because drawing them takes longer than writing a tiny model.
    """
    rng, count = np.random.default_rng([seed, int(type_)]), _POOL_BLOCKS[type_]
    if type_ in (F32, F16):
        return rng.standard_normal(count, dtype=np.float32), 1.0
    blocks = np.zeros((count, GGML_QUANT_SIZES[type_][1]), np.uint8)
    if type_ == Q4_0:
        # Nibbles 1 to 15 stand for -7 to 7: a weight matrix with a mean would hide the signal.
        pairs = rng.integers(1, 16, (count, 16, 2), np.uint8)
        blocks[:, 2:] = pairs[:, :, 0] | (pairs[:, :, 1] << 4)
        return blocks, math.sqrt((15**2 - 1) / 12)
    if type_ == Q8_0:
        blocks[:, 2:] = rng.integers(-127, 128, (count, 32), np.int8).view(np.uint8)
        return blocks, math.sqrt((255**2 - 1) / 12)
    blocks[:, :192] = rng.integers(0, 256, (count, 192), np.uint8)
    sub = rng.integers(8, 25, (count, 16), np.int8)
    sub *= rng.choice(np.array([-1, 1], np.int8), sub.shape)
    blocks[:, 192:208] = sub.view(np.uint8)
    return blocks, math.sqrt((64**2 - 1) / 12 * float(np.mean(sub.astype(np.float64) ** 2)))


class _Pool:
    """Random blocks of one type with a standard deviation of 1. The scale is set when blocks are read."""

    def __init__(self, type_: GGMLQuantizationType, seed: int) -> None:
        self.type = type_
        self.block, self.size = GGML_QUANT_SIZES[type_]
        self.cursor = 0
        self.scale_at = 208 if type_ == Q6_K else 0
        self.source, self.unit = _random(type_, seed)

    def _take(self, count: int) -> np.ndarray:
        part = self.source[self.cursor : self.cursor + count]
        if len(part) < count:
            part = np.concatenate([part, self.source[: count - len(part)]])
        self.cursor = (self.cursor + count) % len(self.source)
        return part

    def chunks(self, elements: int, std: float, mean: float) -> Iterator[np.ndarray]:
        left = elements // self.block
        most = min(_POOL_BLOCKS[self.type], _CHUNK_BYTES // self.size)
        while left:
            count = min(left, most)
            left -= count
            if self.type in (F32, F16):
                part = self._take(count) * np.float32(std) + np.float32(mean)
                yield part if self.type == F32 else part.astype(np.float16)
                continue
            blocks = self._take(count).copy()
            scale = np.array([std / self.unit], "<f2").view(np.uint8)
            blocks[:, self.scale_at : self.scale_at + 2] = scale
            yield blocks


def _add(writer: GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, Int32):
        writer.add_int32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def _write_tensors(out: BinaryIO, writer: GGUFWriter, tensors: Sequence[Tensor], seed: int) -> None:
    pools = {type_: _Pool(type_, seed) for type_ in {tensor.type for tensor in tensors}}
    for tensor in tensors:
        row = tensor.elements // tensor.shape[0]
        for rows, std in tensor.bands:
            for chunk in pools[tensor.type].chunks(rows * row, std, tensor.mean):
                out.write(chunk.data)
        writer.write_padding(out, tensor.nbytes)


def write_gguf(path: Path, meta: Meta, tensors: Iterable[Tensor], *, seed: int = 0) -> None:
    """Writes `path` whole or not at all. `meta` must contain general.architecture. Raises ValueError (bands)."""
    tensors = list(tensors)
    for tensor in tensors:
        if sum(rows for rows, _ in tensor.bands) != tensor.shape[0]:
            raise ValueError(f"{tensor.name}: bands do not cover {tensor.shape[0]} rows")
    part = path.with_name(path.name + ".part")
    writer = GGUFWriter(part, str(meta["general.architecture"]))
    for key, value in meta.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        out = writer.fout[0]
        writer.write_padding(out, out.tell())
        _write_tensors(out, writer, tensors, seed)
        writer.close()
        part.replace(path)
    except BaseException:
        writer.close()
        part.unlink(missing_ok=True)
        raise
