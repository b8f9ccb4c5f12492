"""One side of a comparison, started by measuring.py: a process with one llama.cpp library that executes commands.

Reads one JSON object for each line of stdin, and answers with one on stdout. LLAMA_CPP_LIB_PATH chooses the library;
with --kvedge the library is kvedge's, and contexts can have a method.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
from measuring import chunks

from pykvedge.reference.kvtypes import KvType, ggml_types

ASKED = 24  # approximate tokens of a request to repeat the prompt


def composed(method: str, budget: float) -> Any:
    """Returns the plan of "NAME", or of "NAME+REDUCER": the method with another reducer. Raises KvedgeError."""
    import pykvedge

    name, _, reducer = method.partition("+")
    stages = {"reducer": reducer} if reducer else {}
    return pykvedge.plan(name) if method == "full" else pykvedge.plan(name, budget, **stages)


class Side:
    """A side has the model, and one context for each variant."""

    def __init__(self, model: str, threads: int, kvedge: bool) -> None:
        if kvedge:
            from pykvedge.native import libraries

            libraries.load_backends()
        import llama_cpp.llama_cpp as llama

        self.llama, self.threads = llama, threads
        self._quiet = llama.llama_log_callback(lambda *_: None)
        llama.llama_log_set(self._quiet, None)
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"{model} cannot be loaded")
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.n_embd = llama.llama_model_n_embd(self.model)
        self.contexts: dict[str, Any] = {}
        self.caches: dict[str, Any] = {}
        self.ends: dict[str, int] = {}

    def open(
        self,
        name: str,
        n_ctx: int,
        method: str | None,
        budget: float,
        flash: bool = True,
        copies: bool = False,
        stored: list[str] | None = None,
    ) -> dict[str, Any]:
        """Opens a new context with llama.cpp's defaults except its size, so that stock behaves as its users know it.

        copies: with room for a second sequence, for compress_copy. stored: kv_type and kv_rotate; None: f16.
        """
        kv_type = KvType.parse(*(stored or ["f16"]))
        params = self.llama.llama_context_default_params()
        params.n_ctx, params.n_batch = n_ctx, n_ctx
        if copies:
            params.n_ctx, params.n_seq_max, params.kv_unified = 2 * (n_ctx + ASKED), 2, True
        params.n_threads = params.n_threads_batch = self.threads
        if not flash:
            params.flash_attn_type = self.llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if method is None:
            params.type_k, params.type_v = (ggml_types()[t] for t in (kv_type.k, kv_type.v))
        context = self.llama.llama_init_from_model(self.model, params)
        self.contexts[name], self.ends[name] = context, 0
        if method is not None:
            from pykvedge.library.libkvedge import Cache

            plan = composed(method, budget)
            self.caches[name] = Cache(context, plan, kv_type, auto_compress=False, profiles=self._profiles(plan))
        return {}

    def _profiles(self, plan: Any) -> dict[str, Any]:
        """Makes random profiles for a plan: they change which pairs are kept, but hardly the cost."""
        from pykvedge.plans.profile import COLUMNS
        from pykvedge.reference.stages.base import ProfileTable

        of, out = self.llama, {}
        counts = {"query heads": of.llama_model_n_head, "KV heads": of.llama_model_n_head_kv}
        for stage, kind in plan.profile_kinds().items():
            shape = of.llama_model_n_layer(self.model), counts[COLUMNS[kind].removesuffix("' shares")](self.model)
            drawn = np.random.default_rng(0).uniform(0.5, 1.5, shape)
            out[stage] = ProfileTable((drawn / drawn.sum()).astype(np.float32), np.zeros(0, np.float32))
        return out

    def close(self, name: str) -> dict[str, Any]:
        if name in self.caches:
            self.caches.pop(name).detach()
        self.llama.llama_free(self.contexts.pop(name))
        return {}

    def decode(self, name: str, tokens: list[int]) -> np.ndarray:
        """Decodes tokens at the end of the context. Returns a view of the logits of the last token."""
        batch = self.llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
        self._run(name, batch)
        return np.ctypeslib.as_array(self.llama.llama_get_logits_ith(self.contexts[name], -1), (self.n_vocab,))

    def _run(self, name: str, batch: Any, sequence: int = 0, at: int | None = None) -> None:
        """Decodes a filled batch and frees it. at: position of the batch; None: the end."""
        n, start = batch.n_tokens, self.ends[name] if at is None else at
        for i in range(n):
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = start + i, 1, sequence
            batch.logits[i] = int(i == n - 1)
        status = self.llama.llama_decode(self.contexts[name], batch)
        self.llama.llama_batch_free(batch)
        if status != 0:
            raise SystemExit(f"llama_decode returned {status}")
        self.ends[name] += n if at is None else 0

    def _batch(self, n: int, image: bool, seed: int) -> Any:
        """Makes a batch of n tokens; embeddings for an image."""
        batch = self.llama.llama_batch_init(n, self.n_embd if image else 0, 1)
        batch.n_tokens = n
        if image:
            rows = np.random.default_rng(seed).standard_normal(n * self.n_embd, dtype=np.float32) * 0.02
            np.ctypeslib.as_array(batch.embd, (n * self.n_embd,))[:] = rows
        else:
            np.ctypeslib.as_array(batch.token, (n,))[:] = self.tokens(n, seed)
        return batch

    def part(self, name: str, n: int, image: bool, seed: int) -> dict[str, Any]:
        """Decodes n more tokens of a prompt (image: as embeddings). Returns the time, and the bytes of the scores."""
        batch = self._batch(n, image, seed)
        start, cpu = time.perf_counter(), time.process_time()
        self._run(name, batch)
        took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
        return {**took, "score_bytes": self.caches[name].stats().score_bytes if name in self.caches else 0}

    def compress_copy(self, name: str, method: str, budget: float, parts: list[list[Any]]) -> dict[str, Any]:
        """Compresses a copy of the sequence with a method that needs no scores other than the gathered ones.

        parts: (tokens, whether they are an image's) of the prompt, for methods that read it a second time.
        """
        memory, cache = self.llama.llama_get_memory(self.contexts[name]), self.caches[name]
        plan = composed(method, budget)
        cache.set_plan(plan, self._profiles(plan))
        self.llama.llama_memory_seq_cp(memory, 0, 1, -1, -1)
        try:
            settings = plan.settings("scorer")
            again = self._read_again(name, [(n, image) for n, image in parts], settings) if cache.replays else (0, 0)
            cpu = time.process_time()
            cache.compress(1)
            cpu = time.process_time() - cpu
            took = dict(zip(("again_seconds", "again_cpu_seconds"), again, strict=True))
            return {**took, "seconds": cache.stats(1).compress_us / 1e6, "cpu_seconds": cpu}
        finally:
            self.llama.llama_memory_seq_rm(memory, 1, -1, -1)

    def _read_again(
        self, name: str, parts: list[tuple[int, bool]], settings: dict[str, Any]
    ) -> tuple[float, float]:
        """Reads the prompt's copy a second time, as pykvedge.runtime.replay does. Returns wall and CPU seconds."""
        from pykvedge.native.abi import ReplayChunk

        repeats, end = settings["source"] == "repeat", self.ends[name]
        first, seconds, cpu_seconds = 0, 0.0, 0.0
        for again in chunks(parts, settings["chunk"]) if repeats else [[]]:
            read = [(ASKED, False), *again]
            last = first + sum(n for n, _ in again) if repeats else end
            at = end
            batches = [self._batch(n, image, i) for i, (n, image) in enumerate(read)]
            start, cpu = time.perf_counter(), time.process_time()
            self.caches[name].begin_replay(ReplayChunk(first, last, sum(n for n, _ in read)), 1)
            for (n, _), batch in zip(read, batches, strict=True):
                self._run(name, batch, 1, at)
                at += n
            self.caches[name].end_replay(1)
            seconds, cpu_seconds = seconds + time.perf_counter() - start, cpu_seconds + time.process_time() - cpu
            first = last
        return seconds, cpu_seconds

    def tokens(self, n: int, seed: int) -> list[int]:
        """Returns random text tokens: time and arithmetic do not depend on them."""
        low, high = (300, 30000) if self.n_vocab > 30000 else (self.n_vocab // 2, self.n_vocab - 1)
        return [int(t) for t in np.random.default_rng(seed).integers(low, high, n)]

    def prefill(self, name: str, n: int, seed: int) -> dict[str, Any]:
        tokens = self.tokens(n, seed)
        start = time.perf_counter()
        self.decode(name, tokens)
        middle = time.perf_counter()
        if name in self.caches:
            self.caches[name].compress()
        return {"prefill_s": middle - start, "compress_s": time.perf_counter() - middle}

    def generate(self, name: str, n: int, seed: int) -> dict[str, Any]:
        seconds = []
        for token in self.tokens(n, seed):
            start = time.perf_counter()
            self.decode(name, [token])
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}

    def logits(self, name: str, n: int, steps: int, seed: int, file: str) -> dict[str, Any]:
        """Saves the logits after the prompt and after each teacher-forced step: float32 [steps + 1, vocabulary]."""
        tokens = self.tokens(n + steps, seed)
        rows = [self.decode(name, tokens[:n]).copy()]
        if name in self.caches:
            self.caches[name].compress()  # keeps all rows, but quantises them if the type needs it
        rows += [self.decode(name, [token]).copy() for token in tokens[n:]]
        np.save(file, np.array(rows))
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kvedge", action="store_true")
    args = parser.parse_args()
    side = Side(args.model, args.threads, args.kvedge)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(side, request.pop("do"))(**request)), flush=True)


if __name__ == "__main__":
    main()
