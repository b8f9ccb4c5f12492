"""Computes which layers lie on which device, and their memory, from metadata before a model is loaded.

llama.cpp gives a model's last layers to its devices, and counts the output as one more layer. Each device gets a run of
layers in proportion to its free memory (load_tensors in llama-model.cpp). kvedge's rows lie with their layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from pykvedge.models.gguf import Header, tensor_bytes
from pykvedge.models.shape import Layer, ModelShape, mask_bytes
from pykvedge.native.ggml import Device
from pykvedge.reference.kvtypes import KvType

_FLASH = (64, 80, 96, 112, 128, 256)  # head sizes with flash attention (native/src/device/attention.cpp)
_BLOCKS = ("q8_0", "q4_0")  # quantised types that ggml has too
_SUMS = 4 * (32 << 20)  # bytes for the sums of a prompt's attention (native/src/device/sums.cpp)
_SPARE = 0.05  # share of a device's memory that is left for its driver
_MAX_SPARE = 512 << 20


@dataclass(frozen=True)
class ConversationSize:
    """A conversation for which the devices need room."""

    prompt_tokens: int
    kept_tokens: int  # pairs per head
    kv_type: KvType | None  # the type of keys and values; None: keys and values stay on the host
    n_ubatch: int
    observes: bool = True  # compression reads the attention


@dataclass(frozen=True)
class Share:
    """The part of a model on one device; sizes in bytes."""

    device: Device
    layers: tuple[int, ...]
    output: bool
    weights: int
    kv_prompt: int
    kv_kept: int
    working: int  # compute buffers, masks, queries

    @property
    def needed(self) -> int:
        return self.weights + self.kv_prompt + self.working

    @property
    def usable(self) -> int:
        """The bytes of the device's free memory that kvedge may use."""
        return self.device.free_bytes - min(int(self.device.total_bytes * _SPARE), _MAX_SPARE)

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable

    def as_json(self) -> dict[str, Any]:
        """Returns the numbers for JSON."""
        names = ("weights", "kv_prompt", "kv_kept", "working", "needed", "usable")
        return {
            "name": self.device.name,
            "layers": list(self.layers),
            "output": self.output,
            "bytes": {**{name: getattr(self, name) for name in names}, "free": self.device.free_bytes},
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Placement:
    """The placement of a model's layers."""

    gpu_layers: int  # llama.cpp's count, which includes the output
    n_layers: int
    shares: tuple[Share, ...]
    away: frozenset[str]  # tensors outside of the host's memory

    @property
    def fits(self) -> bool:
        return all(share.fits for share in self.shares)


def assigned(n_layers: int, gpu_layers: int, free: Sequence[int]) -> list[int | None]:
    """Returns the number of the device of each layer and of the output; None: the CPU. free: bytes per device."""
    active = min(gpu_layers, n_layers + 1)
    first = n_layers + 1 - active
    ends = [end / max(sum(free), 1) for end in accumulate(free)]
    return [
        None if not free or i < first else min(bisect_right(ends, (i - first) / active), len(free) - 1)
        for i in range(n_layers + 1)
    ]


def place(
    header: Header, shape: ModelShape, devices: Sequence[Device], size: ConversationSize, gpu_layers: int
) -> Placement:
    """Computes the memory of a model on the devices. gpu_layers: -1 for all. Raises ModelError as ModelShape.of."""
    n_layers = int(header.values[f"{header.architecture}.block_count"])
    count = n_layers + 1 if gpu_layers < 0 else min(gpu_layers, n_layers + 1)
    where = assigned(n_layers, count, [device.free_bytes for device in devices])
    layer_of = {name: _layer_of(name, n_layers) for name in header.tensors}
    shares = []
    for number, device in enumerate(devices):
        indices = tuple(i for i in range(n_layers) if where[i] == number)
        output = where[n_layers] == number
        mine = [name for name, layer in layer_of.items() if layer is not None and where[layer] == number]
        if output and "output.weight" not in header.tensors:
            mine.append("token_embd.weight")  # this tensor also makes the logits
        if indices or output:
            weights = sum(tensor_bytes(header.tensors[name]) or 0 for name in mine if name in header.tensors)
            kept = [layer for layer in shape.layers if layer.index in indices]
            shares.append(_share(device, indices, output, weights, kept, shape, size))
    away = frozenset(name for name, layer in layer_of.items() if layer is not None and where[layer] is not None)
    return Placement(count if shares else 0, n_layers, tuple(shares), away)


def largest(header: Header, shape: ModelShape, devices: Sequence[Device], size: ConversationSize) -> Placement:
    """Returns the placement with the most device layers that fit; maybe none."""
    n_layers = int(header.values[f"{header.architecture}.block_count"])
    tried = (place(header, shape, devices, size, n) for n in range(n_layers + 1, 0, -1))
    return next((found for found in tried if found.fits), place(header, shape, devices, size, 0))


def _layer_of(name: str, n_layers: int) -> int | None:
    """Returns the layer of a tensor; n_layers: the output, None: the input, which the host keeps."""
    head, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    if head == "blk" and number.isdecimal():
        return int(number) if int(number) < n_layers else None
    return n_layers if head.startswith("output") else None


def _share(
    device: Device,
    indices: tuple[int, ...],
    output: bool,
    weights: int,
    kept: list[Layer],
    shape: ModelShape,
    size: ConversationSize,
) -> Share:
    n_ubatch = min(size.n_ubatch, size.prompt_tokens)
    slots = _slots(size.prompt_tokens)
    width = sum(layer.width for layer in kept)
    read, stored = _bytes_per_value(size.kv_type, shape)
    working = shape.compute(n_ubatch)
    if kept and read:
        working += mask_bytes(slots, n_ubatch)
        if shape.head_k not in _FLASH:
            working += 2 * 4 * n_ubatch * slots * shape.n_head
        if size.observes:
            working += _SUMS + len(kept) * n_ubatch * shape.n_head * shape.head_k * 4
    kept_bytes = int(width * stored * _slots(size.kept_tokens))
    return Share(device, indices, output, weights, int(width * read * slots), kept_bytes, working)


def _bytes_per_value(kv_type: KvType | None, shape: ModelShape) -> tuple[float, float]:
    """Returns bytes per number during the prompt and during the answer; 0: rows stay on the host (GraphRows::holds)."""
    if kv_type is None:
        return 0, 0
    alike = kv_type.k == kv_type.v and kv_type.k in _BLOCKS and shape.head_k in _FLASH
    if kv_type.quantised and not alike:
        return 0, 0
    return kv_type.plain.bytes_per_value, kv_type.bytes_per_value


def _slots(n: int) -> int:
    """Returns kvedge's slots for n pairs of a head (slots_for in native/src/device/groups.cpp)."""
    step = 64 if n < 2048 else 256
    return -(-(n + 32) // step) * step
