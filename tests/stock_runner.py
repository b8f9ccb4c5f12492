"""Runs a model with llama.cpp and mtmd's helper, without kvedge, for comparisons."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import batches
import llama_cpp.mtmd_cpp as mtmd
import numpy as np
from batches import llama

PROMPT = "USER: <__media__>\nWhat is in the picture? A naïve 図.\nASSISTANT:"
TEXT = "USER: What is in the picture? A naïve 図.\nASSISTANT:"


@dataclass
class Answer:
    """The result of a run of stock llama.cpp over one prompt."""

    prompt_tokens: int
    image_tokens: int
    logits: np.ndarray  # one row per generated token
    ids: list[int]
    text: str


class Runner:
    """A model, with an optional mmproj, driven through the low-level bindings.

    exact: f32 keys and values, no flash attention.
    """

    def __init__(self, model: Path, mmproj: Path | None = None, n_ctx: int = 2048, exact: bool = False) -> None:
        mtmd.mtmd_helper_log_set(batches.SILENT, ctypes.c_void_p(0))
        self.model = batches.open_model(model)
        self.ctx = batches.open_context(self.model, n_ctx=n_ctx, n_batch=n_ctx, **(batches.EXACT if exact else {}))
        assert self.ctx, f"no context for {model}"
        self.special = True  # whether the tokenizer adds a BOS token
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.mtmd = None
        if mmproj:
            vision = mtmd.mtmd_context_params_default()
            vision.use_gpu, vision.warmup, vision.n_threads = False, False, 1
            self.mtmd = mtmd.mtmd_init_from_file(str(mmproj).encode(), self.model, vision)
            assert self.mtmd, f"{mmproj} does not load"

    def close(self) -> None:
        if self.mtmd:
            mtmd.mtmd_free(self.mtmd)
        llama.llama_free(self.ctx)
        llama.llama_model_free(self.model)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        size = llama.llama_token_to_piece(self.vocab, token, buffer, 256, 0, False)
        return buffer.raw[:size]

    def tokenize(self, text: str) -> list[int]:
        return batches.tokenize(self.vocab, text, beginning=True)

    def _chunks(self, text: str, image: np.ndarray) -> ctypes.c_void_p:
        height, width, _ = image.shape
        data = np.ascontiguousarray(image).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = mtmd.mtmd_bitmap_init(width, height, data)
        chunks = mtmd.mtmd_input_chunks_init()
        raw = text.encode()
        prompt = mtmd.mtmd_input_text(text=raw, text_len=len(raw), add_special=self.special, parse_special=True)
        status = mtmd.mtmd_tokenize(self.mtmd, chunks, ctypes.byref(prompt), (ctypes.c_void_p * 1)(bitmap), 1)
        mtmd.mtmd_bitmap_free(bitmap)
        assert status == 0
        return chunks

    def image_tokens(self, image: np.ndarray) -> int:
        chunks = self._chunks(PROMPT, image)
        try:
            return self._count_image(chunks)
        finally:
            mtmd.mtmd_input_chunks_free(chunks)

    @staticmethod
    def _count_image(chunks: ctypes.c_void_p) -> int:
        parts = [mtmd.mtmd_input_chunks_get(chunks, i) for i in range(mtmd.mtmd_input_chunks_size(chunks))]
        images = [p for p in parts if mtmd.mtmd_input_chunk_get_type(p) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE]
        return sum(mtmd.mtmd_input_chunk_get_n_tokens(p) for p in images)

    def _decode(self, ids: list[int]) -> None:
        tokens = (llama.llama_token * len(ids))(*ids)  # kept alive here: the batch only points to it
        assert llama.llama_decode(self.ctx, llama.llama_batch_get_one(tokens, len(ids))) == 0

    def _prefill(self, image: np.ndarray | None, text: str) -> SimpleNamespace:
        if image is None:
            ids = self.tokenize(text)
            self._decode(ids)
            return SimpleNamespace(tokens=len(ids), image=0, past=len(ids))
        chunks = self._chunks(text, image)
        past = llama.llama_pos(0)
        status = mtmd.mtmd_helper_eval_chunks(
            self.mtmd, self.ctx, chunks, 0, 0, llama.llama_n_batch(self.ctx), True, ctypes.byref(past)
        )
        assert status == 0
        counts = SimpleNamespace(
            tokens=mtmd.mtmd_helper_get_n_tokens(chunks), image=self._count_image(chunks), past=past.value
        )
        mtmd.mtmd_input_chunks_free(chunks)
        return counts

    def answer(
        self, image: np.ndarray | None = None, text: str | None = None, n: int = 8, kept: list[int] | None = None
    ) -> Answer:
        """Greedily continues one prompt in an empty context. kept: the prompt's positions that are not removed."""
        memory = llama.llama_get_memory(self.ctx)
        llama.llama_memory_clear(memory, True)
        prompt = self._prefill(image, text or (PROMPT if image is not None else TEXT))
        for position in sorted(set(range(prompt.past)) - set(range(prompt.past) if kept is None else kept)):
            assert llama.llama_memory_seq_rm(memory, 0, position, position + 1)
        rows, ids = [], []
        for _ in range(n):
            rows.append(batches.logits(self.ctx))
            ids.append(int(rows[-1].argmax()))
            self._decode(ids[-1:])
        text = b"".join(map(self.piece, ids)).decode("utf-8", "replace")
        return Answer(prompt.tokens, prompt.image, np.array(rows), ids, text)


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Returns a smooth gradient with noise, so that all patches differ."""
    y, x = np.mgrid[0:height, 0:width]
    base = np.stack([255 * x / width, 255 * y / height, 127 + 80 * np.sin(x / 9 + y / 7)], axis=-1)
    noise = np.random.default_rng(seed).normal(0, 20, base.shape)
    return np.clip(base + noise, 0, 255).astype(np.uint8)
