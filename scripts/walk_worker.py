"""One side of a random walk: `walk_worker.py SIDE MODEL OUT.npy STEPS SEED [HOST:PORT]`, for random_walk.py.

SIDE is "stock" (the library in LLAMA_CPP_LIB_PATH) or "ours". Both sides make the same random operations on several
sequences in one context. "ours" also compresses with random plans that keep everything, saves and loads sequences, and
sometimes keeps whole rows in memory or in a file. HOST:PORT: an RPC server for the model and rows of "ours".
"""

import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

N_SEQ, N_CTX, LONGEST, N_PROMPT = 4, 2048, 160, 24
METHODS = ("h2o", "snapkv", "lookm", "knorm", "mixkv", "adakv")
COVERS = (1.0, 4096)  # budgets (a share, a number of KV pairs) that cover every sequence

SIDE, MODEL, OUT, STEPS, SEED = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
SERVER = sys.argv[6] if len(sys.argv) > 6 else ""
FOLDER = str(Path(OUT).parent)
if SIDE == "ours":
    import pykvedge
    from pykvedge.library import libkvedge
    from pykvedge.native import abi, ggml

import llama_cpp.llama_cpp as llama  # noqa: E402

SILENT = llama.llama_log_callback(lambda level, text, data: None)


@dataclass
class Sequence:
    """The state of a sequence, the same on both sides."""

    n: int = 0  # position of the next token
    whole: bool = True  # False after a file: then llama.cpp does not know all its positions


class Walk:
    def __init__(self) -> None:
        llama.llama_log_set(SILENT, None)
        llama.llama_backend_init()
        if SERVER:
            ggml.add_server(SERVER)
        model = llama.llama_model_load_from_file(MODEL.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_ubatch, params.n_batch, params.n_seq_max = N_CTX, 64, 256, N_SEQ
        params.kv_unified, params.n_threads, params.n_threads_batch = True, 1, 1
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.type_k = params.type_v = llama.GGML_TYPE_F32
        self.context = llama.llama_init_from_model(model, params)
        self.memory = llama.llama_get_memory(self.context)
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self.cache: Any = SIDE == "ours" and libkvedge.Cache(
            self.context, pykvedge.plan("full"), "f32", devices=abi.DEVICES_ALL if SERVER else abi.DEVICES_AUTO
        )
        self.rng, self.own = random.Random(SEED), random.Random(SEED + 1)  # own: randomness of "ours"
        self.sequences = [Sequence() for _ in range(N_SEQ)]
        self.logits: list[np.ndarray] = []
        self.on_server = False  # whether rows of answers were on the server

    def decode(self, items: list[tuple[int, int, int, bool]]) -> None:
        """Decodes one batch. items: (token, position, sequence, wants logits)."""
        batch = llama.llama_batch_init(len(items), 0, 1)
        batch.n_tokens = len(items)
        for i, (token, position, sequence, wants) in enumerate(items):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, wants
        code = llama.llama_decode(self.context, batch)
        llama.llama_batch_free(batch)
        if code != 0:
            raise SystemExit(f"llama_decode failed with code {code}")
        for i, item in enumerate(items):
            if item[3]:
                row = llama.llama_get_logits_ith(self.context, i)
                self.logits.append(np.ctypeslib.as_array(row, (self.n_vocab,)).copy())

    def read(self) -> None:
        """Reads prompts of one to three sequences in one batch: one after the other, or token by token in turn."""
        items = []
        for s in self.rng.sample(range(N_SEQ), self.rng.randint(1, 3)):
            n, known = self.rng.randint(1, N_PROMPT), self.sequences[s]
            items += [(self.rng.randrange(5, 1000), known.n + i, s, i == n - 1) for i in range(n)]
            known.n += n
        if self.rng.random() < 0.5:
            items.sort(key=lambda item: item[1])
        self.decode(items)

    def answer(self) -> None:
        """Decodes some tokens one by one, of several sequences in each batch."""
        chosen = self.rng.sample(range(N_SEQ), self.rng.randint(1, N_SEQ))
        for _ in range(self.rng.randint(1, 4)):
            self.decode([(self.rng.randrange(5, 1000), self.sequences[s].n, s, True) for s in chosen])
            for s in chosen:
                self.sequences[s].n += 1
        self.on_server = self.on_server or bool(SERVER and self.cache.stats(chosen[0]).device_bytes)

    def copy(self) -> None:
        """Copies a whole sequence, its beginning or a middle part to another sequence."""
        a, b = self.rng.sample(range(N_SEQ), 2)
        self.remove(b, -1, -1)
        known, first, end = self.sequences[a], -1, -1
        if known.whole and known.n > 1 and self.rng.random() < 0.5:
            end = self.rng.randint(1, known.n - 1)
            first = self.rng.randrange(end) if self.rng.random() < 0.3 else 0
        llama.llama_memory_seq_cp(self.memory, a, b, first, end)
        self.sequences[b] = Sequence(known.n if end < 0 else self.end(b), known.whole)

    def end(self, s: int) -> int:
        """Returns the position of the next token. A removal can remove more than requested."""
        return llama.llama_memory_seq_pos_max(self.memory, s) + 1

    def cut(self) -> None:
        """Removes the end of a sequence, a middle part, or all of it."""
        s = self.rng.randrange(N_SEQ)
        n, kind = self.sequences[s].n, self.rng.random()
        if kind < 0.2 or n < 12 or not self.sequences[s].whole:
            self.remove(s, -1, -1)
            self.sequences[s] = Sequence()
        elif kind < 0.6:
            self.remove(s, self.rng.randint(n - 8, n - 1), -1)
            self.sequences[s].n = self.end(s)
        else:
            first = self.rng.randint(1, n - 8)
            self.remove(s, first, first + self.rng.randint(1, 6))

    def remove(self, s: int, first: int, end: int) -> None:
        if not llama.llama_memory_seq_rm(self.memory, s, first, end):
            raise SystemExit("llama_memory_seq_rm failed")

    def keep(self) -> None:
        s = self.rng.randrange(N_SEQ)
        llama.llama_memory_seq_keep(self.memory, s)
        self.sequences = [known if i == s else Sequence() for i, known in enumerate(self.sequences)]

    def compress(self) -> None:
        s = self.rng.randrange(N_SEQ)
        if self.cache:
            if self.own.random() < 0.3:
                self.cache.keep(self.own.choice(("", "ram", "disk")), FOLDER)
            plan = pykvedge.plan(self.own.choice(METHODS), self.own.choice(COVERS))
            if self.own.random() < 0.5:
                self.cache.set_plan(plan)
            else:
                self.cache.set_sequence_plan(s, plan if self.own.random() < 0.8 else None)
            self.cache.compress(s)

    def file(self) -> None:
        """Saves a sequence to a file, and loads the file into a random sequence."""
        a, b = self.rng.randrange(N_SEQ), self.rng.randrange(N_SEQ)
        if self.sequences[a].n == 0:
            return
        if self.cache:
            with tempfile.TemporaryDirectory() as folder:
                path = str(Path(folder) / "s.kvs").encode()
                self.cache.compress(a)
                self.cache.save(path, "walk", b"note", a)
                self.remove(b, -1, -1)
                self.cache.load(path, "walk", b)
        elif a != b:
            self.remove(b, -1, -1)
            llama.llama_memory_seq_cp(self.memory, a, b, -1, -1)
        self.sequences[b] = Sequence(self.sequences[a].n, whole=False)

    def step(self) -> None:
        for s, known in enumerate(self.sequences):
            if known.n > LONGEST:
                self.remove(s, -1, -1)
                self.sequences[s] = Sequence()
        operations = (self.read, self.answer, self.copy, self.cut, self.compress, self.file, self.keep)
        self.rng.choices(operations, (30, 30, 8, 14, 12, 5, 1))[0]()


def main() -> None:
    walk = Walk()
    for i in range(STEPS):
        try:
            walk.step()
        except BaseException as error:
            print(f"step {i} of seed {SEED}: {error}", file=sys.stderr)
            raise SystemExit(1) from None
    if SERVER and not walk.on_server:
        raise SystemExit("no rows were on the server")
    np.save(OUT, np.array(walk.logits))


if __name__ == "__main__":
    main()
