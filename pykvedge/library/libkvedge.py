"""The rest of the package meets kvedge.h here: what the library is, and caches. Nothing is loaded on import."""

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
from pykvedge.library.own_stages import OwnStages
from pykvedge.native.abi import DEVICES_AUTO, KEEP_PLACES, Error, ReplayChunk, Saved, Stats, text
from pykvedge.native.calls import call, lib, raise_
from pykvedge.plans.plan import Plan
from pykvedge.reference.kvtypes import KvType
from pykvedge.reference.stages.base import ProfileTable
from pykvedge.system.guard import Guard, one_thread


def version() -> str:
    return lib().kvedge_version().decode()


def simd() -> str:
    """Names the instruction set of libkvedge's kernels on this machine."""
    return lib().kvedge_simd().decode()


def kernel_tables() -> list[str]:
    """Names the tables of kernels that this machine can run, the chosen one first."""
    return [name.decode() for name in iter(map(lib().kvedge_kernels, itertools.count()).__next__, None)]


def check_kernels(table: str) -> None:
    """Runs every kernel of a table against plain loops. Raises UnsupportedError where a result is wrong."""
    call("check_kernels", table.encode())


class Cache:
    """libkvedge owns the KV memory of one llama_context (kvedge_cache).

    It is for the thread that decodes: a call while another thread is in one, or while llama_decode runs in another,
    raises StateError. `detach` waits for that thread.
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
        """Takes over the KV memory of a llama_context without tokens. Raises what kvedge_attach reports.

        profiles: of the plan's stages that need one, by name (profiles.tables_for). later_floor: tokens that a message
        keeps at least which follows another; None: as many as the library says (kvedge_plan_set). devices: where rows
        lie (kvedge_devices).
        """
        self._later_floor = later_floor
        self.guard = Guard("cache", over="the cache was detached; attach again")
        options = options_of(KvType.parse(kv_type))
        options.auto_compress, options.devices = auto_compress, devices
        self._handle = c.c_void_p()
        with NativePlan(plan, profiles, self._later_floor) as native:
            call("attach", context, native.handle, c.byref(options), c.byref(self._handle))
            self.replays = bool(lib().kvedge_plan_replays(native.handle))  # whether a second pass is asked for
        self.plan = plan
        self.keeps = False  # whether whole rows stay
        self.own = native.own  # C has a copy of the plan, and with it these callbacks
        self._owns: dict[int, OwnStages] = {}  # of sequences with plans of their own

    def detach(self) -> None:
        """Gives the context back to llama.cpp, its memory cleared. Does nothing the second time."""
        if not self._handle:
            return
        with self.guard.closing():
            if self._handle:
                lib().kvedge_detach(self._handle)
                self._handle = c.c_void_p()

    @property
    def attached(self) -> bool:
        """This is false after detach."""
        return bool(self._handle)

    @property
    def handle(self) -> c.c_void_p:
        """The kvedge_cache. Raises StateError after detach."""
        if not self._handle:
            raise errors.StateError("the cache was detached; attach again")
        return self._handle

    @one_thread
    def set_plan(self, plan: Plan, profiles: Mapping[str, ProfileTable] | None = None) -> None:
        """Compresses prompts that complete from now on by this plan. profiles: as for a new cache."""
        with NativePlan(plan, profiles, self._later_floor) as native:
            call("set_plan", self.handle, native.handle)
            self.replays = bool(lib().kvedge_plan_replays(native.handle))
        self.plan, self.own = plan, native.own

    @one_thread
    def set_sequence_plan(
        self, sequence: int, plan: Plan | None, profiles: Mapping[str, ProfileTable] | None = None
    ) -> None:
        """Gives one sequence a plan of its own; None: the cache's again. profiles: as for a new cache."""
        if plan is None:
            call("set_sequence_plan", self.handle, sequence, None)
            self._owns.pop(sequence, None)
            return
        with NativePlan(plan, profiles, self._later_floor) as native:
            call("set_sequence_plan", self.handle, sequence, native.handle)
        self._owns[sequence] = native.own

    @one_thread
    def set_auto_compress(self, on: bool) -> None:
        """Sets whether the first token decoded after a prompt triggers the compression."""
        call("set_auto_compress", self.handle, on)

    @one_thread
    def keep(self, place: str, folder: str = "", most_bytes: int = 0, kv_type: str = "f16") -> None:
        """Keeps whole rows behind compressed ones from now on: in "ram", on "disk" in a folder, or not ("").

        most_bytes: of all whole rows together; 0: no limit. kv_type: "f16", as they are, or "q8_0".
        Raises what kvedge_keep reports.
        """
        call("keep", self.handle, KEEP_PLACES[place], os.fsencode(folder), most_bytes, KvType.parse(kv_type).numbers[0])
        self.keeps = bool(place)

    @one_thread
    def limit_tokens(self, first: int, last: int, most: int, sequence: int = 0) -> None:
        """Limits what compressions keep of tokens [first, last): rows of every head; negative: the plan decides.

        Raises what kvedge_limit_tokens reports.
        """
        call("limit_tokens", self.handle, sequence, first, last, most)

    @one_thread
    def choose_again(self, sequence: int = 0) -> None:
        """Chooses again from whole rows what a sequence keeps, under the limits of now.

        Raises what kvedge_choose_again reports.
        """
        with self._owns.get(sequence, self.own).explained():
            call("choose_again", self.handle, sequence)

    @one_thread
    def keep_problem(self, sequence: int = 0) -> str:
        """Says why a sequence has no whole rows although they were asked for; empty: it has them, or they were not."""
        return text(lib().kvedge_keep_problem(self.handle, sequence))

    @one_thread
    def compress(self, sequence: int = 0) -> None:
        """Compresses, now, what was added since the last compression. Raises PluginError if a plugin's stage fails."""
        with self._owns.get(sequence, self.own).explained():
            call("compress", self.handle, sequence)

    def keeps_all(self, sequence: int = 0) -> bool:
        """Tells whether the plan of the cache keeps all that came since the last compression."""
        stats = self.stats(sequence)
        n = stats.n_pending
        return plan_budget(self.plan, n, later=n < stats.n_tokens, later_floor=self._later_floor) >= n

    @one_thread
    def begin_replay(self, chunk: ReplayChunk, sequence: int = 0) -> None:
        """What is decoded next is a chunk of a second pass. Raises what kvedge_replay_begin reports."""
        call("replay_begin", self.handle, sequence, c.byref(chunk))

    @one_thread
    def end_replay(self, sequence: int = 0) -> None:
        """Takes back what was decoded since begin_replay. Raises what kvedge_replay_end reports."""
        call("replay_end", self.handle, sequence)

    @one_thread
    def begin_verify(self, n_tokens: int, sequence: int = 0, whole: bool = False) -> None:
        """The next n_tokens are an answer's, several at once. whole: they attend to whole rows, and take the place of
        tokens that were decoded with the compressed ones since the last time. Raises what kvedge_verify_begin or
        kvedge_verify_whole reports.
        """
        call("verify_whole" if whole else "verify_begin", self.handle, sequence, n_tokens)

    @one_thread
    def end_verify(self, n_accepted: int, sequence: int = 0) -> None:
        """Keeps the first of these tokens, and removes the others. Raises what kvedge_verify_end reports."""
        call("verify_end", self.handle, sequence, n_accepted)

    @one_thread
    def verify_room(self, sequence: int = 0) -> int:
        """Counts the tokens that begin_verify takes at most now; 0: it refuses."""
        return lib().kvedge_verify_room(self.handle, sequence)

    @one_thread
    def expect(self, n_tokens: int, sequence: int = 0) -> None:
        """Announces that so many tokens follow, so that devices make room for them once."""
        call("expect", self.handle, sequence, n_tokens)

    @one_thread
    def bound_prompt(self, image_mask: np.ndarray, sequence: int = 0) -> None:
        """Announces that the next decode brings a whole prompt in one pass, whose layers are compressed one by one.

        image_mask: [T] uint8, 1 for an image token. Raises what kvedge_bound_prompt reports.
        """
        mask = image_mask.astype("uint8", order="C")
        call("bound_prompt", self.handle, sequence, mask.ctypes.data, len(mask))

    def bounded_layers(self, sequence: int = 0) -> int:
        """Counts the layers that a bounded prompt has behind it, also while llama_decode runs in this thread."""
        return lib().kvedge_bounded_layers(self.handle, sequence)

    @one_thread
    def compress_stream(self, sequence: int = 0) -> None:
        """Makes the sequence a stream; compresses all that it holds to the plan's bound. Raises UnsupportedError."""
        with self._owns.get(sequence, self.own).explained():
            call("compress_stream", self.handle, sequence)

    @one_thread
    def cells(self, sequence: int = 0) -> int:
        """Counts the tokens of the sequence that take up room in llama.cpp's own cache of n_ctx places."""
        if (n := lib().kvedge_cells(self.handle, sequence)) < 0:
            raise errors.StateError("another thread decodes with this cache; wait until it is done")
        return n

    @one_thread
    def renumber(self, following: int, most: int, sequence: int = 0) -> int:
        """Makes the sequence's positions smaller; returns the one at which the next token comes, at most `most`.

        following: where it would come. Logits are gone. Raises UnsupportedError where keys cannot be turned, and what
        kvedge_renumber reports.
        """
        at = c.c_int32(following)
        call("renumber", self.handle, sequence, most, c.byref(at))
        return at.value

    @one_thread
    def check(self) -> None:
        """Raises the first error that happened inside llama_decode since the last call, if there was one."""
        error = Error()
        if lib().kvedge_take_error(self.handle, c.byref(error)) != 0 or error.status != 0:
            with ExitStack() as stages:
                for own in (self.own, *self._owns.values()):
                    stages.enter_context(own.explained())
                raise_(error)

    @one_thread
    def stats(self, sequence: int = 0) -> Stats:
        """Returns figures of one sequence."""
        out = Stats(struct_size=c.sizeof(Stats))
        call("get_stats", self.handle, sequence, c.byref(out))
        return out

    @one_thread
    def device_problem(self, sequence: int = 0) -> str:
        """Says why the last compression took place on the host although rows lay on a device; empty: it did not."""
        return text(lib().kvedge_device_problem(self.handle, sequence))

    @one_thread
    def rows_on_devices(self, n: int) -> int:
        """Counts the rows that n tokens have on devices: one for each KV head of the layers there."""
        heads = (len(lengths) for i, lengths in enumerate(self.lengths()) if lib().kvedge_layer_device(self.handle, i))
        return n * sum(heads)

    def layer_ids(self) -> list[int]:
        """Lists the numbers that the stored layers have in the model."""
        return [self.layer_id(i) for i in range(self.stats().n_layers)]

    @one_thread
    def lengths(self, sequence: int = 0) -> list[list[int]]:
        """Counts the KV pairs held now, per stored layer and KV head."""
        out: list[list[int]] = []
        for layer in range(self.stats(sequence).n_layers):
            heads: list[int] = []
            while (n := lib().kvedge_head_length(self.handle, sequence, layer, len(heads))) >= 0:
                heads.append(n)
            out.append(heads)
        return out

    def layer_id(self, layer: int) -> int:
        """Returns the number that a stored layer has in the model."""
        return lib().kvedge_layer_id(self.handle, layer)

    @one_thread
    def tokens(self, layer: int, head: int, sequence: int = 0) -> list[int]:
        """Lists the original token indices that a stored layer's KV head holds, ascending."""
        n = lib().kvedge_head_length(self.handle, sequence, layer, head)
        out = (c.c_int32 * max(n, 1))()
        call("head_tokens", self.handle, sequence, layer, head, out, len(out))
        return list(out)[:n]

    @one_thread
    def watch(self, on: bool) -> None:
        """Sets whether the attention of tokens that are decoded one by one is kept for `attention`."""
        call("watch", self.handle, on)

    @one_thread
    def attention(self, layer: int, query_head: int, sequence: int = 0) -> np.ndarray:
        """[n] float32: softmax weights that the last token paid, in a stored layer's query head, to the rows of its KV
        head, in the order of `tokens`. Raises StateError unless that token was decoded by itself and watched.
        """
        n_heads = lib().kvedge_query_heads(self.handle, layer)
        if not 0 <= query_head < n_heads:
            raise errors.UsageError(f"there is no query head {query_head} in stored layer {layer}")
        lengths = self.lengths(sequence)[layer] or [0]
        out = np.empty(lengths[query_head // (n_heads // len(lengths))], dtype=np.float32)
        where = out.ctypes.data_as(c.POINTER(c.c_float))
        call("attention", self.handle, sequence, layer, query_head, where, len(out))
        return out

    @one_thread
    def attention_of_all(self, sequence: int = 0) -> np.ndarray:
        """[stored layers, H, n] float32: `attention` of all heads, which hold n rows each; 0 for missing ones."""
        live, layers = self.handle, range(self.stats(sequence).n_layers)
        heads = [lib().kvedge_query_heads(live, i) for i in layers]
        n = lib().kvedge_head_length(live, sequence, 0, 0)
        if any(length != n for lengths in self.lengths(sequence) for length in lengths):
            raise errors.StateError("heads hold different numbers of rows; ask for the attention of one at a time")
        out = np.zeros((len(heads), max(heads), n), dtype=np.float32)
        for i in layers:
            for h in range(heads[i]):
                call("attention", live, sequence, i, h, out[i, h].ctypes.data_as(c.POINTER(c.c_float)), n)
        return out

    @one_thread
    def save(self, path: bytes, model: str, note: bytes, sequence: int = 0, whole: bool = False) -> None:
        """Writes a sequence and a note of the caller's to a file. model: a name that load compares.

        whole: its whole rows, too, if there are any.
        """
        with _saving(self, whole):
            call("save", self.handle, sequence, path, model.encode(), note, len(note))

    @one_thread
    def load(self, path: bytes, model: str, sequence: int = 0) -> None:
        """Reads a file of `save` into an empty sequence. Raises SessionFileError, UsageError, OutOfMemoryError."""
        call("load", self.handle, sequence, path, model.encode())


@contextmanager
def _saving(cache: Cache, whole: bool) -> Iterator[None]:
    """What is saved or packed inside has its whole rows with it, or not."""
    call("keep_saved", cache.handle, whole)
    try:
        yield
    finally:
        call("keep_saved", cache.handle, False)


def pack(cache: Cache, model: str, sequence: int = 0, whole: bool = False) -> bytearray:
    """Returns a sequence as the bytes of a file of Cache.save without a note. Raises what that raises."""
    size = c.c_size_t(0)
    with _saving(cache, whole):
        call("pack", cache.handle, sequence, model.encode(), None, c.byref(size))
        data = bytearray(size.value)
        call("pack", cache.handle, sequence, model.encode(), (c.c_char * len(data)).from_buffer(data), c.byref(size))
    return data


def unpack(cache: Cache, data: bytes | bytearray | memoryview, model: str, sequence: int = 0) -> None:
    """Reads bytes of `pack` into an empty sequence. Raises what Cache.load raises."""
    given = np.frombuffer(data, np.uint8)  # no copy
    call("unpack", cache.handle, sequence, model.encode(), given.ctypes.data, len(given))


def read_saved(path: bytes) -> tuple[str, bytes, bool]:
    """Reads model and note of a file of Cache.save, and whether it has whole rows. Raises SessionFileError."""
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
    """Keys [n, d_k] and values [n, d_v], float32, of a stored layer's KV head, in the order of Cache.tokens."""
    _, _, d_k, d_v = shape(cache, layer)
    n = max(lib().kvedge_head_length(cache.handle, sequence, layer, head), 0)
    k, v = np.empty((n, d_k), np.float32), np.empty((n, d_v), np.float32)
    to = [x.ctypes.data_as(c.POINTER(c.c_float)) for x in (k, v)]
    call("head_rows", cache.handle, sequence, layer, head, *to, n)
    return k, v


def biases(cache: Cache, layer: int, head: int, sequence: int = 0) -> np.ndarray:
    """[n] float32: what is added to the logits of a stored layer's KV head, in the order of Cache.tokens."""
    out = np.empty(max(lib().kvedge_head_length(cache.handle, sequence, layer, head), 0), np.float32)
    call("head_biases", cache.handle, sequence, layer, head, out.ctypes.data_as(c.POINTER(c.c_float)), len(out))
    return out


def pending_scores(cache: Cache, layer: int, sequence: int = 0) -> np.ndarray:
    """[Hkv, T] float32: what the plan's scorer makes of the tokens that are not compressed yet. Raises StateError."""
    out = np.empty((shape(cache, layer)[1], cache.stats(sequence).n_pending), np.float32)
    at = out.ctypes.data_as(c.POINTER(c.c_float))
    with cache.own.explained():
        call("pending_scores", cache.handle, sequence, layer, at, out.size)
    return out
