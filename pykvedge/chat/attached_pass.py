"""Runs the second pass over prompts of an attached llama_cpp.Llama, for methods that need a second pass.

llama_cpp reads texts by `eval`, and its chat handlers read pictures by one function of mtmd: a wrapper records both.
The pass runs before the first token of an answer is read.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np

from pykvedge.errors import UnsupportedError
from pykvedge.library.libkvedge import Cache
from pykvedge.models.composer import Composer
from pykvedge.models.model import silent
from pykvedge.models.vision import ImagePiece, TextPiece
from pykvedge.models.vocabulary import Vocabulary
from pykvedge.native import libraries
from pykvedge.plans.plan import Plan
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.llama_context import Context
from pykvedge.runtime.replay import Passage, Requests, parts
from pykvedge.runtime.sequence import Sequence


class AttachedPass:
    """Records what the model has read since its last compression, and reads a prompt a second time."""

    def __init__(self, llm: Any, cache: Cache) -> None:
        self.seconds = 0.0  # seconds of the last second pass
        self._llm, self._cache = llm, cache
        self._passage, self._end = Passage(), 0  # recorded pieces, and the position behind them
        self._prompt = False  # whether the passage holds a part of a prompt
        self._requests: Requests | None = None
        self._recorder: PictureRecorder | None = None

    def close(self) -> None:
        """Restores the chat handler, and forgets the recorded pieces."""
        self._forget()
        if self._recorder is not None:
            self._recorder.end()
            self._recorder = None

    def look(self) -> None:
        """Begins to record the pictures of the model's chat handler, if the plan needs a second pass."""
        handler = getattr(self._llm, "chat_handler", None)
        seen = self._recorder.handler if self._recorder is not None else None
        if self._cache.replays and handler is not seen and hasattr(handler, "_mtmd_cpp"):
            if self._recorder is not None:
                self._recorder.end()
            self._recorder = PictureRecorder(handler, self._llm.ctx, self._record_picture)

    def read(self, n_before: int, tokens: list[int], generated: bool) -> None:
        """Records tokens read from position n_before on. generated: the tokens belong to an answer."""
        self._from(n_before)
        self._passage.add(TextPiece(list(tokens)))
        self._end, self._prompt = n_before + len(tokens), self._prompt or not generated

    @property
    def waits(self) -> bool:
        """Returns whether a prompt must be read a second time before its answer."""
        return self._prompt and self._cache.replays

    def place(self) -> tuple[int, list[int]]:
        """Returns the position behind the recorded pieces, and the recorded text tokens since the last compression."""
        return self._end, self._passage.tokens()

    def go_on(self, end: int, tokens: list[int]) -> None:
        """Restores the values returned by `place`. Use them only if `waits` was false then."""
        self._forget()
        self._passage.add(TextPiece(tokens))
        self._end = end

    def _record_picture(self, n_before: int, n_after: int, piece: ImagePiece) -> None:
        self._from(n_before)
        self._passage.add(piece)
        self._end, self._prompt = n_after, True

    def _from(self, position: int) -> None:
        if position != self._end:  # the model read something unrecorded, or tokens were removed
            self._forget()

    def _forget(self) -> None:
        for piece in self._passage.pieces:
            if isinstance(piece, ImagePiece):
                libraries.mtmd().mtmd_input_chunk_free(piece.chunk)
        self._passage, self._prompt = Passage(), False

    def before_answer(self, plan: Plan) -> None:
        """Runs the second pass before an answer if needed. Raises ContextError, UnsupportedError, native errors."""
        if self._prompt and self._cache.replays:
            self.seconds, started = 0.0, time.perf_counter()
            if self._read_again(plan):
                self.seconds = time.perf_counter() - started
        if self._prompt:
            self._forget()

    def _read_again(self, plan: Plan) -> bool:
        cache, stats = self._cache, self._cache.stats()
        n = stats.n_pending
        if cache.keeps_all():
            return False
        pieces = self._passage.last(n)
        if plan.settings("scorer")["source"] == "repeat" and sum(piece.n_tokens for piece in pieces) < n:
            raise UnsupportedError(
                f"method '{plan.method}' reads the prompt again, but kvedge does not know the content of some of its "
                f"{n} tokens, for example pictures of another chat handler; use pykvedge.Session, or "
                f"scorer.source=instruction"
            )
        bindings = libraries.llama()
        vocabulary = Vocabulary(bindings, bindings.llama_get_model(self._llm.ctx))
        self._requests = self._requests or Requests(Composer(vocabulary, None))
        context = Context.lent(self._llm.ctx, vocabulary)
        sequence = Sequence(Driver.lent(context, cache, self._recorder))
        sequence.n_past, sequence.n_cells = self._end, stats.n_tokens
        try:
            room, begins = context.n_ctx - stats.n_tokens, n == stats.n_tokens
            chunks = list(parts(plan, pieces, n, room, self._requests, begins))
            if self._recorder is None and any(isinstance(one, ImagePiece) for part in chunks for one in part.pieces):
                raise UnsupportedError(
                    "the pictures cannot be read again, because the model's chat handler was "
                    "removed; set the chat handler again"
                )
            sequence.run(sequence.second_pass(chunks, keep_logits=False), "", silent, None)
        finally:
            context.close()
        return True


class PictureRecorder:
    """Wraps the mtmd of a chat handler, and reports each picture that one context reads.

    Has the methods of Vision that decoding a picture needs.
    """

    def __init__(self, handler: Any, context: Any, on_picture: Any) -> None:
        """on_picture(position before, position after, piece) is called for each picture; it frees the piece's chunk."""
        self.handler, self.mtmd = handler, libraries.mtmd()
        self._context, self._on_picture = context, on_picture
        self._inner = handler._mtmd_cpp
        handler._mtmd_cpp = self

    def end(self) -> None:
        """Restores the chat handler's mtmd."""
        self._context = None  # if another wrapper covers this wrapper, this wrapper stays and reports nothing
        if self.handler._mtmd_cpp is self:
            self.handler._mtmd_cpp = self._inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def handle(self) -> Any:
        return self.handler.mtmd_ctx

    def non_causal(self) -> bool:
        """Returns whether an image's tokens attend to each other in both directions."""
        return bool(self.mtmd.mtmd_decode_use_non_causal(self.handle, None))

    def mtmd_helper_eval_chunk_single(self, *arguments: Any) -> int:
        """Has the arguments of mtmd's function of this name."""
        status = self._inner.mtmd_helper_eval_chunk_single(*arguments)
        _, context, chunk, n_past, *_, after = arguments
        mtmd = self.mtmd
        is_image = mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE
        if status == 0 and context == self._context and is_image:
            n = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
            bindings = libraries.llama()
            width = bindings.llama_model_n_embd_inp(bindings.llama_get_model(context))
            rows = np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(self.handle), (n, width)).copy()
            piece = ImagePiece(mtmd.mtmd_input_chunk_copy(chunk), n, "", n, rows)
            self._on_picture(getattr(n_past, "value", n_past), _value(after), piece)
        return status


def _value(reference: Any) -> int:
    """Returns the int that a ctypes reference points to."""
    if hasattr(reference, "_obj"):
        return reference._obj.value
    return ctypes.cast(reference, ctypes.POINTER(ctypes.c_int32))[0]
