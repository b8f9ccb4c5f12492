"""Reads one long prompt into a tiny model, with kvedge and with llama.cpp's KV cache, and compares the logits.

    .venv/bin/python scripts/long_context.py --tokens 131072                  # 128 K tokens of context
    .venv/bin/python scripts/long_context.py --tokens 8192 --trained 512      # positions beyond the training length

modelgen writes the model for this test: random weights, and one layer with one KV head, so that attention takes most of
the time. llama.cpp stores float32 and does not use flash attention, whose half-precision sums err by 0.08 nats at
131072 tokens. The exit code is 1 if the next token's distributions differ by more than 1e-6 nats.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from llama_source import SourceError, ended
from modelgen.tiny import default_spec, write_tiny
from random_walk import largest_divergence

import pykvedge
from pykvedge.models.model import Model
from pykvedge.models.vision import TextPiece
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.llama_context import N_UBATCH, ContextSize
from pykvedge.runtime.sequence import Sequence

TOLERANCE = 1e-6  # nats, KL(llama.cpp || kvedge); a hundred times the measured value
GENERATED = 8
ROOM = 64


@dataclass(frozen=True)
class Reading:
    """The results of one side: logits [GENERATED, n_vocab] of the next tokens, prompt seconds, cache bytes."""

    logits: np.ndarray
    seconds: float
    n_bytes: int


def write_model(folder: Path, trained: int) -> Path:
    spec = replace(default_spec("llama"), n_layers=1, n_heads=1, n_heads_kv=1, head_size=32, n_vocab=384,
                   n_ctx_train=trained, weight="f32")  # fmt: skip
    return Path(write_tiny("llama", folder, spec=spec)[0])


def read(path: Path, tokens: list[int], threads: int, method: str = "full") -> Reading:
    """Reads tokens with kvedge's KV memory, then generates by feeding the first tokens again."""
    model = Model(path)
    size = ContextSize(len(tokens) + ROOM, N_UBATCH, prompt_tokens=len(tokens))
    driver = Driver(model, None, size, threads)
    try:
        driver.take_over(pykvedge.plan(method, *([] if method == "full" else [0.2])))
        sequence, started = Sequence(driver), time.perf_counter()
        sequence.read([TextPiece(tokens)])
        rows, seconds = [driver.context.logits().copy()], time.perf_counter() - started
        sequence.compress()
        n_bytes = driver.cache.stats().bytes if driver.cache is not None else 0
        for token in tokens[: GENERATED - 1]:
            sequence.extend(token)
            rows.append(driver.context.logits().copy())
        return Reading(np.array(rows), seconds, n_bytes)
    finally:
        driver.close()
        model.close()


def read_plainly(path: Path, tokens: list[int], threads: int) -> Reading:
    """Reads tokens with llama.cpp's KV cache, as `read` does."""
    model = Model(path)
    llama, n_ctx = model.llama, len(tokens) + ROOM
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, N_UBATCH, N_UBATCH
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.type_k = params.type_v = llama.GGML_TYPE_F32
    context = llama.llama_init_from_model(model.handle, params)

    def decode(part: list[int]) -> np.ndarray:
        held = (llama.llama_token * len(part))(*part)  # kept alive here: the batch only points to it
        if llama.llama_decode(context, llama.llama_batch_get_one(held, len(part))) != 0:
            raise SourceError("llama.cpp cannot read the prompt")
        return np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (model.n_vocab,)).copy()

    try:
        started = time.perf_counter()
        for at in range(0, len(tokens), N_UBATCH):
            row = decode(tokens[at : at + N_UBATCH])
        seconds = time.perf_counter() - started
        rows = [row, *(decode([token]) for token in tokens[: GENERATED - 1])]
        return Reading(np.array(rows), seconds, n_ctx * model.kv_bytes_per_token(4))
    finally:
        llama.llama_free(context)
        model.close()


def compare(n_tokens: int, trained: int, threads: int) -> dict[str, float]:
    """Returns the largest divergence in nats, and the seconds and bytes of each side and of a compressed prompt."""
    rng = np.random.default_rng(n_tokens)
    tokens = [1, *(int(t) for t in rng.integers(263, 380, n_tokens - 1))]
    with tempfile.TemporaryDirectory(prefix="kvedge-long-") as folder:
        path = write_model(Path(folder), trained)
        full, kept = (read(path, tokens, threads, method) for method in ("full", "lookm"))
        plain = read_plainly(path, tokens, threads)
    if not np.isfinite(kept.logits).all():
        raise SourceError("after a compression the logits are no numbers")
    return {
        "tokens": n_tokens, "trained": trained, "divergence": largest_divergence(plain.logits, full.logits),
        "kvedge_s": round(full.seconds, 2), "lookm_s": round(kept.seconds, 2), "llama_cpp_s": round(plain.seconds, 2),
        "kvedge_bytes": full.n_bytes, "lookm_bytes": kept.n_bytes, "llama_cpp_bytes": plain.n_bytes,
    }  # fmt: skip


def main() -> int:
    """Returns 1 if the sides differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072, metavar="N")
    parser.add_argument("--trained", type=int, metavar="N", help="the training length that the model states: --tokens")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    found = compare(args.tokens, args.trained or args.tokens + ROOM, args.threads)
    print(json.dumps(found))
    return 1 if found["divergence"] > TOLERANCE else 0


if __name__ == "__main__":
    sys.exit(ended(main))
