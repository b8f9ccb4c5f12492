"""The GGUF files in llama.cpp (any build of it, through the llama_cpp bindings): greedy answers and accuracy."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as lc
from llama_cpp import mtmd_cpp as mc

from pykvedge.lab.demo_tasks.evalset import Sample, samples
from pykvedge.lab.demo_tasks.prompts import prompt
from pykvedge.lab.demo_tasks.tasks import NEEDLE_TASKS, TASKS
from pykvedge.lab.eval.metrics import rouge_l


@lc.llama_log_callback
def _silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    del level, text, data


class GgufModel:
    def __init__(self, text: Path, mmproj: Path, context: int = 2048, threads: int = 1) -> None:
        lc.llama_log_set(_silent, ctypes.c_void_p(0))
        mc.mtmd_log_set(_silent, ctypes.c_void_p(0))
        mc.mtmd_helper_log_set(_silent, ctypes.c_void_p(0))
        lc.llama_backend_init()
        self.model = lc.llama_model_load_from_file(str(text).encode(), lc.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"{text} does not load")
        params = lc.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, 512, 512
        params.n_threads = params.n_threads_batch = threads
        self.ctx = lc.llama_init_from_model(self.model, params)
        self.vocab = lc.llama_model_get_vocab(self.model)
        vision = mc.mtmd_context_params_default()
        vision.use_gpu, vision.print_timings, vision.n_threads = False, False, threads
        self.vision = mc.mtmd_init_from_file(str(mmproj).encode(), self.model, vision)
        if not self.vision:
            raise RuntimeError(f"{mmproj} does not load")

    def tokenize(self, text: str) -> list[int]:
        raw, room = text.encode(), len(text) * 2 + 8
        tokens = (lc.llama_token * room)()
        count = lc.llama_tokenize(self.vocab, raw, len(raw), tokens, room, False, True)
        return list(tokens[:count])

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        size = lc.llama_token_to_piece(self.vocab, token, buffer, 64, 0, False)
        return buffer.raw[:size]

    def _prefill(self, text: str, images: Sequence[np.ndarray]) -> int:
        """Evaluate a prompt from an empty cache; the position after it."""
        lc.llama_memory_clear(lc.llama_get_memory(self.ctx), True)
        bitmaps = []
        for image in images:
            data = np.ascontiguousarray(image)
            pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            bitmaps.append(mc.mtmd_bitmap_init(image.shape[1], image.shape[0], pointer))
        raw = text.encode()
        chunks, whole = mc.mtmd_input_chunks_init(), mc.mtmd_input_text(raw, len(raw), True, True)
        array = (mc.mtmd_bitmap_p_ctypes * len(bitmaps))(*bitmaps)
        past = lc.llama_pos(0)
        bad = mc.mtmd_tokenize(self.vision, chunks, ctypes.byref(whole), array, len(bitmaps))
        bad = bad or mc.mtmd_helper_eval_chunks(
            self.vision, self.ctx, chunks, lc.llama_pos(0), lc.llama_seq_id(0), 512, True, ctypes.byref(past)
        )
        mc.mtmd_input_chunks_free(chunks)
        for bitmap in bitmaps:
            mc.mtmd_bitmap_free(bitmap)
        if bad:
            raise RuntimeError(f"the prompt was not evaluated: {bad}")
        return past.value

    def answer(self, text: str, images: Sequence[np.ndarray], limit: int = 100) -> str:
        """Greedy answer to a rendered prompt."""
        size, out = lc.llama_vocab_n_tokens(self.vocab), b""
        self._prefill(text, images)
        for _ in range(limit):
            logits = np.ctypeslib.as_array(lc.llama_get_logits_ith(self.ctx, -1), (size,))
            token = int(logits.argmax())
            if lc.llama_vocab_is_eog(self.vocab, token):
                break
            out += self.piece(token)
            one = (lc.llama_token * 1)(token)
            if lc.llama_decode(self.ctx, lc.llama_batch_get_one(one, 1)):
                raise RuntimeError("a token was not decoded")
        return out.decode(errors="replace").strip()

    def answer_sample(self, sample: Sample) -> str:
        return self.answer(prompt(sample.messages()), sample.images())


def gguf_accuracy(model: GgufModel, count: int, images: int, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Percent exact and mean ROUGE-L, per task and turn."""
    table = {}
    for task, second in itertools.product(TASKS, (False, True)):
        if task in NEEDLE_TASKS and images < 2:
            continue
        chosen = list(itertools.islice(samples(task, seed, images, second), count))
        answers = [model.answer_sample(s) for s in chosen]
        exact = sum(a == s.answer for a, s in zip(answers, chosen, strict=True))
        rouge = sum(rouge_l(a, s.answer) for a, s in zip(answers, chosen, strict=True))
        table[task + (" (turn 2)" if second else "")] = (100 * exact / count, rouge / count)
    return table
