"""Wraps kvedge.h for the rest of the package: facts about the library, and caches. Importing loads no library."""

from __future__ import annotations

import ctypes as c
import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from pykvedge import errors
from pykvedge.library.native_plan import NativePlan, options_of, plan_budget
from pykvedge.library.plugin_stages import PluginStages
from pykvedge.native.abi import DEVICES_AUTO, KEEP_PLACES, Error, ReplayChunk, Saved, Stats, text
from pykvedge.native.calls import call, lib, raise_
from pykvedge.plans.plan import Plan
from pykvedge.reference.kvtypes import KvType
from pykvedge.reference.stages.base import ProfileTable
from pykvedge.system.guard import Guard, one_thread


def version() -> str:
    return lib().kvedge_version().decode()


def simd() -> str:
    """Returns the instruction set of libkvedge's kernels on this machine."""
    return lib().kvedge_simd().decode()


def kernel_tables() -> list[str]:
    """Returns the kernel tables that this machine can run, the chosen table first."""
    return [name.decode() for name in iter(map(lib().kvedge_kernels, itertools.count()).__next__, None)]


def check_kernels(table: str) -> None:
    """Runs every kernel of a table against plain loops. Raises UnsupportedError for a wrong result."""
    call("check_kernels", table.encode())


class Cache:
    """The KV memory of one llama_context, owned by libkvedge (kvedge_cache).

    Only the decoding thread may use a cache: a call during another thread's call, or during llama_decode in another
    thread, raises StateError. `detach` waits for that thread.
    """

    def __init__(
        self,
        context: Any,
        plan: Plan,
        kv_type: str | KvType = "f16",
        auto_compress: bool = True,
        profiles: Mapping[str, ProfileTable] | None = None,
        later_floor: int | None = None,
        devices: int = DEVICES_AUTO,
    ) -> None:
        """Takes over the KV memory of a llama_context without tokens. Raises the errors of kvedge_attach.

        profiles: for the plan's stages that need one, by stage (profiles.tables_for). later_floor: least tokens kept of
        a message that follows another message; None: the library's default (kvedge_plan_set). devices: where rows are
        stored (kvedge_devices).
        """
        self._later_floor = later_floor
        self.guard = Guard("cache", over="the cache was detached from the model; attach kvedge again")
        options = options_of(KvType.parse(kv_type))
        options.auto_compress, options.devices = auto_compress, devices
        self._handle = c.c_void_p()
        with NativePlan(plan, profiles, self._later_floor) as native:
            call("attach", context, native.handle, c.byref(options), c.byref(self._handle))
            self.replays = bool(lib().kvedge_plan_replays(native.handle))  # whether the plan needs a second pass
        self.plan = plan
        self.keeps = False  # whether whole rows are kept
        self.plugins = native.plugins  # these callbacks must live as long as C's copy of the plan
        self._sequence_plugins: dict[int, PluginStages] = {}  # for sequences with separate plans

    def detach(self) -> None:
        """Returns the context to llama.cpp with empty memory. A second call does nothing."""
        if not self._handle:
            return
        with self.guard.closing():
            if self._handle:
                lib().kvedge_detach(self._handle)
                self._handle = c.c_void_p()

    @property
    def attached(self) -> bool:
        """Returns False after detach."""
        return bool(self._handle)

    @property
    def handle(self) -> c.c_void_p:
        """Returns the kvedge_cache. Raises StateError after detach."""
        if not self._handle:
            raise errors.StateError("the cache was detached; attach again")
        return self._handle

    @one_thread
    def set_plan(self, plan: Plan, profiles: Mapping[str, ProfileTable] | None = None) -> None:
        """Sets the plan of later compressions. profiles: as in the constructor."""
        with NativePlan(plan, profiles, self._later_floor) as native:
            call("set_plan", self.handle, native.handle)
            self.replays = bool(lib().kvedge_plan_replays(native.handle))
        self.plan, self.plugins = plan, native.plugins

    @one_thread
    def set_sequence_plan(
        self, sequence: int, plan: Plan | None, profiles: Mapping[str, ProfileTable] | None = None
    ) -> None:
        """Sets a separate plan for one sequence. None: the cache's plan again. profiles: as in the constructor."""
        if plan is None:
            call("set_sequence_plan", self.handle, sequence, None)
            self._sequence_plugins.pop(sequence, None)
            return
        with NativePlan(plan, profiles, self._later_floor) as native:
            call("set_sequence_plan", self.handle, sequence, native.handle)
        self._sequence_plugins[sequence] = native.plugins

    @one_thread
    def set_auto_compress(self, on: bool) -> None:
        """Sets whether the first token decoded after a prompt triggers the compression."""
        call("set_auto_compress", self.handle, on)

    @one_thread
    def keep(self, place: str, folder: str = "", most_bytes: int = 0, kv_type: str = "f16") -> None:
        """Keeps whole rows behind compressed rows from now on: in "ram", on "disk" in a folder, or "": nowhere.

        most_bytes: limit for all whole rows; 0: no limit. kv_type: "f16" (as computed) or "q8_0". Raises the errors of
        kvedge_keep.
        """
        call("keep", self.handle, KEEP_PLACES[place], os.fsencode(folder), most_bytes, KvType.parse(kv_type).numbers[0])
        self.keeps = bool(place)

    @one_thread
    def limit_tokens(self, first: int, last: int, most: int, sequence: int = 0) -> None:
        """Limits the rows per head that compressions keep of tokens [first, last). Negative: no limit beside the plan.

        Raises the errors of kvedge_limit_tokens.
        """
        call("limit_tokens", self.handle, sequence, first, last, most)

    @one_thread
    def choose_again(self, sequence: int = 0) -> None:
        """Chooses a sequence's kept rows again from its whole rows, under the present limits.

        Raises the errors of kvedge_choose_again.
        """
        with self._sequence_plugins.get(sequence, self.plugins).explained():
            call("choose_again", self.handle, sequence)

    @one_thread
    def keep_problem(self, sequence: int = 0) -> str:
        """Returns why a sequence lacks requested whole rows, or an empty string."""
        return text(lib().kvedge_keep_problem(self.handle, sequence))

    @one_thread
    def compress(self, sequence: int = 0) -> None:
        """Compresses the tokens added since the last compression. Raises PluginError if a plugin's stage fails."""
        with self._sequence_plugins.get(sequence, self.plugins).explained():
            call("compress", self.handle, sequence)

    def keeps_all(self, sequence: int = 0) -> bool:
        """Returns whether the cache's plan keeps all tokens added since the last compression."""
        stats = self.stats(sequence)
        n = stats.n_pending
        return plan_budget(self.plan, n, later=n < stats.n_tokens, later_floor=self._later_floor) >= n

    @one_thread
    def begin_replay(self, chunk: ReplayChunk, sequence: int = 0) -> None:
        """Begins a chunk of a second pass: the next decoded tokens. Raises the errors of kvedge_replay_begin."""
        call("replay_begin", self.handle, sequence, c.byref(chunk))

    @one_thread
    def end_replay(self, sequence: int = 0) -> None:
        """Removes the tokens decoded since begin_replay. Raises the errors of kvedge_replay_end."""
        call("replay_end", self.handle, sequence)

    @one_thread
    def begin_verify(self, n_tokens: int, sequence: int = 0, whole: bool = False) -> None:
        """Announces that the next pass decodes n_tokens of an answer at once. whole: they attend to whole rows, and
        replace tokens decoded over compressed rows since the last verification. Raises the errors of
        kvedge_verify_begin or kvedge_verify_whole.
        """
        call("verify_whole" if whole else "verify_begin", self.handle, sequence, n_tokens)

    @one_thread
    def end_verify(self, n_accepted: int, sequence: int = 0) -> None:
        """Keeps the first n_accepted tokens, and removes the others. Raises the errors of kvedge_verify_end."""
        call("verify_end", self.handle, sequence, n_accepted)

    @one_thread
    def verify_room(self, sequence: int = 0) -> int:
        """Returns the most tokens that begin_verify accepts now. 0: none."""
        return lib().kvedge_verify_room(self.handle, sequence)

    @one_thread
    def expect(self, n_tokens: int, sequence: int = 0) -> None:
        """Announces the number of tokens that follow, so that devices allocate for them once."""
        call("expect", self.handle, sequence, n_tokens)

    @one_thread
    def bound_prompt(self, image_mask: np.ndarray, sequence: int = 0) -> None:
        """Announces that the next decode brings a whole prompt in one pass, whose layers are compressed one by one.

        image_mask: [T] uint8, 1 for an image token. Raises the errors of kvedge_bound_prompt.
        """
        mask = image_mask.astype("uint8", order="C")
        call("bound_prompt", self.handle, sequence, mask.ctypes.data, len(mask))

    def bounded_layers(self, sequence: int = 0) -> int:
        """Returns the completed layers of a bounded prompt. Callable during llama_decode, in the same thread."""
        return lib().kvedge_bounded_layers(self.handle, sequence)

    @one_thread
    def compress_stream(self, sequence: int = 0) -> None:
        """Makes the sequence a stream, and compresses all its tokens to the plan's limit. Raises UnsupportedError."""
        with self._sequence_plugins.get(sequence, self.plugins).explained():
            call("compress_stream", self.handle, sequence)

    @one_thread
    def cells(self, sequence: int = 0) -> int:
        """Returns the sequence's tokens that occupy cells of llama.cpp's cache, which has n_ctx cells."""
        if (n := lib().kvedge_cells(self.handle, sequence)) < 0:
            raise errors.StateError("another thread decodes with this cache; wait until that thread ends its call")
        return n

    @one_thread
    def renumber(self, following: int, most: int, sequence: int = 0) -> int:
        """Renumbers the sequence's positions, and returns the position of the next token, at most `most`.

        following: the next token's position before. Makes the logits invalid. Raises UnsupportedError if keys cannot be
        rotated, and the errors of kvedge_renumber.
        """
        at = c.c_int32(following)
        call("renumber", self.handle, sequence, most, c.byref(at))
        return at.value

    @one_thread
    def check(self) -> None:
        """Raises the first error inside llama_decode since the last call, if there is one."""
        error = Error()
        if lib().kvedge_take_error(self.handle, c.byref(error)) != 0 or error.status != 0:
            with ExitStack() as stages:
                for plugins in (self.plugins, *self._sequence_plugins.values()):
                    stages.enter_context(plugins.explained())
                raise_(error)

    @one_thread
    def stats(self, sequence: int = 0) -> Stats:
        """Returns the figures of one sequence."""
        out = Stats(struct_size=c.sizeof(Stats))
        call("get_stats", self.handle, sequence, c.byref(out))
        return out

    @one_thread
    def device_problem(self, sequence: int = 0) -> str:
        """Returns why the last compression ran on the host although rows are on a device, or an empty string."""
        return text(lib().kvedge_device_problem(self.handle, sequence))

    @one_thread
    def rows_on_devices(self, n: int) -> int:
        """Returns the number of rows that n tokens have on devices: one per KV head of the layers there."""
        heads = (len(lengths) for i, lengths in enumerate(self.lengths()) if lib().kvedge_layer_device(self.handle, i))
        return n * sum(heads)

    def layer_ids(self) -> list[int]:
        """Returns the model's layer numbers of the stored layers."""
        return [self.layer_id(i) for i in range(self.stats().n_layers)]

    @one_thread
    def lengths(self, sequence: int = 0) -> list[list[int]]:
        """Returns the current KV pairs per stored layer and KV head."""
        out: list[list[int]] = []
        for layer in range(self.stats(sequence).n_layers):
            heads: list[int] = []
            while (n := lib().kvedge_head_length(self.handle, sequence, layer, len(heads))) >= 0:
                heads.append(n)
            out.append(heads)
        return out

    def layer_id(self, layer: int) -> int:
        """Returns the model's layer number of a stored layer."""
        return lib().kvedge_layer_id(self.handle, layer)

    @one_thread
    def tokens(self, layer: int, head: int, sequence: int = 0) -> list[int]:
        """Returns the original token indices that a stored layer's KV head holds, ascending."""
        n = lib().kvedge_head_length(self.handle, sequence, layer, head)
        out = (c.c_int32 * max(n, 1))()
        call("head_tokens", self.handle, sequence, layer, head, out, len(out))
        return list(out)[:n]

    @one_thread
    def watch(self, on: bool) -> None:
        """Sets whether the attention of singly decoded tokens is recorded for `attention`."""
        call("watch", self.handle, on)

    @one_thread
    def attention(self, layer: int, query_head: int, sequence: int = 0) -> np.ndarray:
        """Returns [n] float32: the last token's softmax weights in a stored layer's query head, over the rows of its KV
        head, in the order of `tokens`. Raises StateError unless that token was decoded alone and watched.
        """
        n_heads = lib().kvedge_query_heads(self.handle, layer)
        if not 0 <= query_head < n_heads:
            raise errors.UsageError(
                f"stored layer {layer} has no query head {query_head}, only heads 0 to {n_heads - 1}"
            )
        lengths = self.lengths(sequence)[layer] or [0]
        out = np.empty(lengths[query_head // (n_heads // len(lengths))], dtype=np.float32)
        where = out.ctypes.data_as(c.POINTER(c.c_float))
        call("attention", self.handle, sequence, layer, query_head, where, len(out))
        return out

    @one_thread
    def attention_of_all(self, sequence: int = 0) -> np.ndarray:
        """Returns [stored layers, H, n] float32: `attention` of all heads, 0 for missing heads. Raises StateError if
        heads hold different numbers of rows."""
        live, layers = self.handle, range(self.stats(sequence).n_layers)
        heads = [lib().kvedge_query_heads(live, i) for i in layers]
        n = lib().kvedge_head_length(live, sequence, 0, 0)
        if any(length != n for lengths in self.lengths(sequence) for length in lengths):
            raise errors.StateError(
                "attention_of_all needs KV heads with equal numbers of KV pairs; call attention for each head"
            )
        out = np.zeros((len(heads), max(heads), n), dtype=np.float32)
        for i in layers:
            for h in range(heads[i]):
                call("attention", live, sequence, i, h, out[i, h].ctypes.data_as(c.POINTER(c.c_float)), n)
        return out

    @one_thread
    def save(self, path: bytes, model: str, note: bytes, sequence: int = 0, whole: bool = False) -> None:
        """Writes a sequence and a note to a file. model: a name that load compares.

        whole: includes whole rows, if there are any. Raises SessionFileError, UsageError.
        """
        with _saving(self, whole):
            call("save", self.handle, sequence, path, model.encode(), note, len(note))

    @one_thread
    def load(self, path: bytes, model: str, sequence: int = 0) -> None:
        """Reads a file of `save` into an empty sequence. Raises SessionFileError, UsageError, OutOfMemoryError."""
        call("load", self.handle, sequence, path, model.encode())


@contextmanager
def _saving(cache: Cache, whole: bool) -> Iterator[None]:
    """Sets whether files and packs made inside the block include whole rows."""
    call("keep_saved", cache.handle, whole)
    try:
        yield
    finally:
        call("keep_saved", cache.handle, False)


def pack(cache: Cache, model: str, sequence: int = 0, whole: bool = False) -> bytearray:
    """Returns a sequence as the bytes of a Cache.save file without a note. Raises the errors of Cache.save."""
    size = c.c_size_t(0)
    with _saving(cache, whole):
        call("pack", cache.handle, sequence, model.encode(), None, c.byref(size))
        data = bytearray(size.value)
        call("pack", cache.handle, sequence, model.encode(), (c.c_char * len(data)).from_buffer(data), c.byref(size))
    return data


def unpack(cache: Cache, data: bytes | bytearray | memoryview, model: str, sequence: int = 0) -> None:
    """Reads bytes of `pack` into an empty sequence. Raises the errors of Cache.load."""
    given = np.frombuffer(data, np.uint8)  # without a copy
    call("unpack", cache.handle, sequence, model.encode(), given.ctypes.data, len(given))


def read_saved(path: bytes) -> tuple[str, bytes, bool]:
    """Returns model and note of a Cache.save file, and whether it has whole rows. Raises SessionFileError."""
    saved = Saved(struct_size=c.sizeof(Saved))
    call("read_saved", path, c.byref(saved), None, 0)
    note = c.create_string_buffer(max(saved.note_bytes, 1))
    call("read_saved", path, c.byref(saved), note, saved.note_bytes)
    return saved.model.decode("utf-8", "replace"), note.raw[: saved.note_bytes], saved.whole


def shape(cache: Cache, layer: int) -> tuple[int, int, int, int]:
    """Returns (H, Hkv, d_k, d_v) of a stored layer."""
    out = (c.c_int32(), c.c_int32(), c.c_int32(), c.c_int32())
    call("layer_shape", cache.handle, layer, *(c.byref(x) for x in out))
    return out[0].value, out[1].value, out[2].value, out[3].value


def rows(cache: Cache, layer: int, head: int, sequence: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys [n, d_k] and values [n, d_v], float32, of a stored layer's KV head, in the order of Cache.tokens."""
    _, _, d_k, d_v = shape(cache, layer)
    n = max(lib().kvedge_head_length(cache.handle, sequence, layer, head), 0)
    k, v = np.empty((n, d_k), np.float32), np.empty((n, d_v), np.float32)
    to = [x.ctypes.data_as(c.POINTER(c.c_float)) for x in (k, v)]
    call("head_rows", cache.handle, sequence, layer, head, *to, n)
    return k, v


def biases(cache: Cache, layer: int, head: int, sequence: int = 0) -> np.ndarray:
    """Returns [n] float32: the terms added to the logits of a stored layer's KV head, in the order of Cache.tokens."""
    out = np.empty(max(lib().kvedge_head_length(cache.handle, sequence, layer, head), 0), np.float32)
    call("head_biases", cache.handle, sequence, layer, head, out.ctypes.data_as(c.POINTER(c.c_float)), len(out))
    return out


def pending_scores(cache: Cache, layer: int, sequence: int = 0) -> np.ndarray:
    """Returns [Hkv, T] float32: the scorer's scores of the tokens that are not compressed yet. Raises StateError."""
    out = np.empty((shape(cache, layer)[1], cache.stats(sequence).n_pending), np.float32)
    at = out.ctypes.data_as(c.POINTER(c.c_float))
    with cache.plugins.explained():
        call("pending_scores", cache.handle, sequence, layer, at, out.size)
    return out
