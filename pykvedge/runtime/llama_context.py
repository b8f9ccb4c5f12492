"""Wraps a llama.cpp context: decodes text and images, and tracks the position of the next token."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pykvedge.errors import CancelledError, ContextError, KvedgeError, ModelError, OutOfMemoryError
from pykvedge.models.model import Model
from pykvedge.models.shape import ModelShape, mask_bytes
from pykvedge.models.vision import ImagePiece, Vision
from pykvedge.models.vocabulary import Vocabulary
from pykvedge.native import libraries, llamacpp
from pykvedge.native.calls import CallbackErrors
from pykvedge.reference.kvtypes import KvType, ggml_types
from pykvedge.runtime.bounded_batch import OnePass, image_positions
from pykvedge.system import memory
from pykvedge.system.shown import counted

N_BATCH = 2048
N_UBATCH = 512
DEFAULT_CTX = 4096
ROOM_TO_ANSWER = 512  # least tokens that an automatic context has beyond the prompt
CELL = 64  # bytes that llama.cpp needs per token of a context, beside keys and values


@dataclass(frozen=True)
class ContextSize:
    """The size of a context to make."""

    n_ctx: int
    n_ubatch: int = N_UBATCH
    kv_type: str | KvType = "f16"
    prompt_tokens: int = 0  # tokens of the first prompt, to estimate memory
    n_seq: int = 1  # sequences that share the n_ctx tokens
    peak_tokens: int = 0  # most tokens of the first prompt in memory at once; 0: all tokens
    n_outputs: int = 0  # most tokens of one pass with logits; at least n_seq


def check_memory(
    model: Model, size: ContextSize, threads: int, whole_cache: bool, advice: str = "lower --ctx"
) -> None:
    """Raises OutOfMemoryError if a context of this size will not fit.

    whole_cache: llama.cpp allocates the KV cache for n_ctx tokens at once. False: the cache grows with its tokens.
    advice: what the user can do, for the message.
    """
    try:
        shape = ModelShape.of(model.header)
    except ModelError:  # the header says too little for an estimate; llama.cpp will report what is wrong
        return
    n_ubatch = min(size.n_ubatch, size.n_ctx)
    tokens = size.n_ctx if whole_cache else min((size.peak_tokens or size.prompt_tokens) + 1, size.n_ctx)
    cache = tokens * shape.kv_per_token(KvType.parse(size.kv_type).plain.bytes_per_value)
    compute = shape.compute(n_ubatch, whole_cache) + mask_bytes(size.n_ctx, n_ubatch) + CELL * size.n_ctx
    what = f"a context of {counted(size.n_ctx, 'token')} with a prompt of {size.prompt_tokens}"
    needed = cache + compute + memory.addresses_to_compute(threads)
    memory.require(needed, what, f"{advice} or close other programs")


class SequenceEnd:
    """The end of a sequence: n_past is the position of the next token, n_cells the number of tokens in the cache.

    The numbers differ: an image of an M-RoPE model has fewer positions than tokens, and pruning leaves gaps.
    """

    def __init__(self, number: int = 0) -> None:
        self.number, self.n_past, self.n_cells = number, 0, 0


class Batch:
    """Collects up to `size` tokens of several sequences, which llama.cpp decodes at once. n: number of tokens."""

    def __init__(self, llama: Any, size: int) -> None:
        self.n, self._batch = 0, llama.llama_batch()
        self._tokens, self._positions, self._sequences = (np.zeros(size, np.int32) for _ in range(3))
        self._ones, self._wanted = np.ones(size, np.int32), np.zeros(size, np.int8)
        sequences = ctypes.POINTER(ctypes.POINTER(llama.llama_seq_id))
        self._places = self._sequences.ctypes.data + np.arange(size, dtype=np.uintp) * self._sequences.itemsize
        self._batch.token = self._tokens.ctypes.data_as(ctypes.POINTER(llama.llama_token))
        self._batch.pos = self._positions.ctypes.data_as(ctypes.POINTER(llama.llama_pos))
        self._batch.n_seq_id = self._ones.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self._batch.seq_id = self._places.ctypes.data_as(sequences)
        self._batch.logits = self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))

    def clear(self) -> None:
        self.n = 0

    def add(self, tokens: list[int], at: SequenceEnd, want_logits: bool) -> int:
        """Appends tokens of one sequence. want_logits: for the last token. Returns the last token's index."""
        if len(tokens) == 1:  # the case of an answer: slices would cost more time than a small model's step
            i, self.n = self.n, self.n + 1
            self._tokens[i], self._positions[i], self._sequences[i] = tokens[0], at.n_past, at.number
            self._wanted[i] = want_logits
            return i
        here = slice(self.n, self.n + len(tokens))
        self._tokens[here] = tokens
        self._positions[here] = np.arange(at.n_past, at.n_past + len(tokens))
        self._sequences[here] = at.number
        self._wanted[here] = 0
        self.n = here.stop
        self._wanted[self.n - 1] = want_logits
        return self.n - 1

    def want_all(self) -> None:
        self._wanted[: self.n] = 1

    def as_llama(self) -> Any:
        """Returns a llama_batch that shares this object's arrays."""
        self._batch.n_tokens = self.n
        return self._batch


class Context:
    """A llama_context. Decoding appends tokens at place `at`; the caller sets `at` to the end of the sequence."""

    _lent = False
    model: Any  # a Model; a Vocabulary if lent

    def __init__(self, model: Model, size: ContextSize, threads: int) -> None:
        """Raises OutOfMemoryError or KvedgeError with llama.cpp's reason."""
        llama = self.llama = libraries.llama()
        self.model = model
        params = llama.llama_context_default_params()
        params.n_ctx = size.n_ctx
        params.n_batch = max(N_BATCH, size.n_ubatch)
        params.n_ubatch = size.n_ubatch
        params.n_threads = params.n_threads_batch = threads
        plain = KvType.parse(size.kv_type).plain  # for layers that llama.cpp keeps
        params.type_k, params.type_v = ggml_types()[plain.k], ggml_types()[plain.v]
        params.n_outputs_max = max(size.n_seq, size.n_outputs)  # a prompt needs logits of its last token only
        params.n_seq_max, params.kv_unified = size.n_seq, size.n_seq > 1
        with llamacpp.collected_errors() as lines:
            self.handle = llama.llama_init_from_model(model.handle, params)
        if not self.handle:
            why = llamacpp.reason(lines, "llama.cpp does not say why")
            kind = OutOfMemoryError if "alloc" in why or "memory" in why else KvedgeError
            raise kind(f"a context of {counted(size.n_ctx, 'token')} cannot be created: {why}; lower --ctx")
        self._begin()
        self.n_ctx = min(self.n_ctx, size.n_ctx)

    @classmethod
    def lent(cls, handle: Any, vocabulary: Vocabulary) -> Context:
        """Wraps a llama_context that the caller made and frees; the caller sets positions."""
        self = cls.__new__(cls)
        self.llama, self.model, self.handle = vocabulary.llama, vocabulary, handle
        self._lent = True
        self._begin()
        return self

    def _begin(self) -> None:
        llama = self.llama
        self.n_batch = llama.llama_n_batch(self.handle)
        self.n_ctx = self.n_made = llama.llama_n_ctx(self.handle)  # llama.cpp makes a multiple of 256
        self.n_ubatch = llama.llama_n_ubatch(self.handle)
        self.at = SequenceEnd()
        self.takes_gaps = False  # whether positions may have gaps: llama.cpp refuses gaps in its own KV memory
        self.batch = Batch(llama, self.n_batch)
        self._abort: Any = None
        self._callback_errors = CallbackErrors()  # errors raised by `look` inside llama.cpp

    def close(self) -> None:
        """Frees the context. A second call does nothing."""
        if getattr(self, "handle", None):
            if not self._lent:
                self.llama.llama_free(self.handle)
            self.handle = None
            self.at = SequenceEnd()  # the old end is a sequence, which refers to its context

    def clear(self) -> None:
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.handle), True)
        self.at.n_past = self.at.n_cells = 0

    def set_threads(self, threads: int, batch_threads: int) -> None:
        """Sets the threads of later passes: `threads` for one token, `batch_threads` for the rest and compression."""
        self.llama.llama_set_n_threads(self.handle, threads, batch_threads)

    @property
    def room(self) -> int:
        return self.n_ctx - self.at.n_cells

    def copy(self, sequence: int, to: int) -> None:
        """Makes sequence number `to` a copy of another sequence. Does not change places."""
        self.drop(to)
        self.llama.llama_memory_seq_cp(self.llama.llama_get_memory(self.handle), sequence, to, -1, -1)

    def cut(self, sequence: int, position: int, end: int = -1) -> bool:
        """Removes a sequence's tokens from a position on, up to `end` (-1: all). Does not change its end.

        Returns False and changes nothing if layers that llama.cpp keeps cannot go back so far.
        """
        return take_back(self.llama, self.handle, sequence, position, end)

    def drop(self, sequence: int) -> None:
        """Removes all tokens of a sequence. Does not change its end."""
        self.llama.llama_memory_seq_rm(self.llama.llama_get_memory(self.handle), sequence, -1, -1)

    def logits(self, output: int = -1) -> np.ndarray:
        """Returns the requested logits [n_vocab] float32 at an index of the last batch; -1: the last logits.

        The array is a view, valid until the next decode.
        """
        row = self.llama.llama_get_logits_ith(self.handle, output)
        return np.ctypeslib.as_array(row, (self.model.n_vocab,))

    def put_back(self, logits: np.ndarray) -> None:
        """Replaces the logits of the last decoded token by [n_vocab] float32."""
        self.logits()[:] = logits

    def stop_when(self, cancel: threading.Event | None, look: Callable[[], None] | None = None) -> None:
        """Makes a running decode stop when the event is set (None: never). look: called repeatedly during a decode."""
        llama = self.llama

        def asked(_: Any) -> bool:
            if look is not None:
                look()
            return cancel is not None and cancel.is_set()

        called = llama.ggml_abort_callback
        self._abort = called(self._callback_errors.wrap(asked, True)) if cancel or look else called()
        llama.llama_set_abort_callback(self.handle, self._abort, None)

    def decode(self, tokens: list[int], want_logits: bool) -> None:
        """Appends tokens. want_logits: for the last token. Raises ContextError, CancelledError, KvedgeError."""
        for start in range(0, len(tokens), self.n_batch):
            part = tokens[start : start + self.n_batch]
            self.batch.clear()
            self.batch.add(part, self.at, want_logits and start + len(part) == len(tokens))
            self.decode_batch()
            self._move(len(part))

    def decode_each(self, tokens: list[int]) -> np.ndarray:
        """Appends tokens as `decode_all` does. Returns [n, n_vocab] float32: a copy of the logits after each token."""
        self.decode_all(tokens)
        rows = self.llama.llama_get_logits(self.handle)
        return np.ctypeslib.as_array(rows, (len(tokens), self.model.n_vocab)).copy()

    def decode_all(self, tokens: list[int]) -> None:
        """Appends tokens in one pass, with logits for each. At most ContextSize.n_outputs tokens.

        Raises the errors of `decode`.
        """
        self.batch.clear()
        self.batch.add(tokens, self.at, True)
        self.batch.want_all()
        self.decode_batch()
        self._move(len(tokens))

    def _move(self, n_tokens: int, n_past: int | None = None) -> None:
        self.at.n_cells += n_tokens
        self.at.n_past = self.at.n_past + n_tokens if n_past is None else n_past

    def decode_image(self, vision: Vision, piece: ImagePiece) -> None:
        """Appends an encoded image. Raises the errors of `decode`."""
        if piece.embeddings is None:
            raise KvedgeError("the image was not encoded; encode the image before decoding")
        if piece.kept is not None:
            self._decode_rows(vision, piece, piece.embeddings)
            return
        position = libraries.llama().llama_pos(0)
        embeddings = piece.embeddings.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        # a non-causal model must see all tokens of an image in one batch
        n_batch = piece.n_tokens if vision.non_causal() else min(self.n_batch, piece.n_tokens)
        given = (vision.handle, self.handle, piece.chunk, embeddings, self.at.n_past, self.at.number, n_batch,
                 ctypes.byref(position), vision.mtmd.mtmd_helper_post_decode_callback(), None)  # fmt: skip
        self._checked(lambda: vision.mtmd.mtmd_helper_decode_image_chunk(*given))
        self._move(piece.n_tokens, position.value)

    def _decode_rows(self, vision: Vision, piece: ImagePiece, embeddings: np.ndarray) -> None:
        """Appends the rows that a pruner kept of an image; mtmd cannot decode a part of an image."""
        mrope, gaps = self.model.has_mrope, self.takes_gaps
        positions, end = image_positions(vision, piece, self.at.n_past, mrope, gaps)
        both = vision.non_causal()
        step = piece.n_tokens if both else self.n_batch
        self.llama.llama_set_causal_attn(self.handle, not both)
        try:
            for at in range(0, piece.n_tokens, step):
                part = slice(at, at + step)
                rows = np.ascontiguousarray(embeddings[part])
                mask = np.ones(len(rows), dtype=np.uint8)
                self.decode_whole(OnePass(np.ascontiguousarray(positions[:, part]), mask, end, rows), want_logits=False)
        finally:
            self.llama.llama_set_causal_attn(self.handle, True)

    def decode_whole(self, prompt: OnePass, want_logits: bool = True) -> None:
        """Appends a prompt in one batch. Bounded prefill needs n_ubatch >= prompt. want_logits: for the last token.

        Raises the errors of `decode`.
        """
        n, llama = prompt.n_tokens, self.llama
        sequence = (llama.llama_seq_id * 1)(self.at.number)
        pointer = ctypes.POINTER(llama.llama_seq_id)
        batch = llama.llama_batch()
        batch.n_tokens = n
        if prompt.embeddings is not None:
            batch.embd = prompt.embeddings.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        elif prompt.tokens is not None:
            batch.token = prompt.tokens.ctypes.data_as(ctypes.POINTER(llama.llama_token))
        batch.pos = prompt.positions.ctypes.data_as(ctypes.POINTER(llama.llama_pos))
        batch.n_seq_id = (ctypes.c_int32 * n)(*[1] * n)
        batch.seq_id = (pointer * n)(*[ctypes.cast(sequence, pointer)] * n)
        batch.logits = (ctypes.c_int8 * n)(*[0] * (n - 1), want_logits)
        self._checked(lambda: llama.llama_decode(self.handle, batch))
        self._move(n, prompt.end)

    def decode_batch(self) -> None:
        """Decodes the tokens in `batch`. Does not change places. Raises the errors of `decode`."""
        batch = self.batch.as_llama()
        self._checked(lambda: self.llama.llama_decode(self.handle, batch))

    def _checked(self, run: Callable[[], int]) -> None:
        with llamacpp.collected_errors() as lines:
            status = run()
        self._callback_errors.raise_first()
        if status == 0:
            return
        if status == 1:
            raise ContextError(f"the context of {counted(self.n_ctx, 'token')} is full; raise --ctx")
        if status == 2:
            raise CancelledError
        why = llamacpp.reason(lines, f"status {status}")
        if status == -2:
            raise OutOfMemoryError(f"llama.cpp lacks memory to continue: {why}; lower --ctx")
        raise KvedgeError(f"llama.cpp cannot decode the prompt: {why}")


def take_back(llama: Any, context: Any, sequence: int, position: int, end: int = -1) -> bool:
    """Removes a sequence's tokens from a position on, up to `end` (-1: all).

    Returns False and changes nothing if that is impossible: recurrent layers take no token back, and windowed layers
    must still hold everything that the token before the position sees.
    """
    memory, window = llama.llama_get_memory(context), llama.llama_model_n_swa(llama.llama_get_model(context))
    if window > 0 and llama.llama_memory_seq_pos_min(memory, sequence) > max(position - window, 0):
        return False
    return llama.llama_memory_seq_rm(memory, sequence, position, end)


def ubatch_for(vision: Vision | None, image_tokens: int) -> int:
    """Returns the tokens that one pass must hold: a non-causal model cannot split an image."""
    if vision is not None and image_tokens > N_UBATCH and vision.non_causal():
        return image_tokens
    return N_UBATCH
