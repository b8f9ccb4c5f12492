"""Several users share one RPC device: while one user gets an answer, other users free memory of the device.

    crowd_worker.py CASE OPERATIONS HOST:PORT,... MODEL

A separate process: ggml ends it when the server hangs up. An answer must not change when other users are active.
"""

import itertools
import sys

from contexts import TinyContext, random_tokens
from threads import in_threads

import pykvedge
from pykvedge.library import libkvedge
from pykvedge.native import ggml
from pykvedge.native.abi import DEVICES_ALL
from pykvedge.runtime.sampling import Sampling

WORDS = "The quick brown fox jumps over the lazy dog. "
SHORT, LONG = Sampling(max_tokens=3), Sampling(max_tokens=12)


class OnDevices(TinyContext):
    def _watch_stock(self, params):
        """Does nothing: the weights are on a device, where this process cannot read them."""


def session(model: str, rpc: str) -> pykvedge.Session:
    settings = {"threads": 1, "n_ctx": 2048, "kv_type": "f32", "undo": True}
    return pykvedge.Session(model, plan=pykvedge.plan("snapkv", 0.4), rpc=rpc, **settings)


def restless(model: str, rpc: str):
    """Yields after each operation, in an endless series of new sessions. The operations free memory of the device."""
    while True:
        with session(model, rpc) as chat:
            for _ in range(3):
                yield chat.ask(WORDS * 4, sampling=SHORT).read()
                yield chat.ask("And?", sampling=SHORT).read()
                yield chat.undo()
                yield chat.clear()
            yield chat.ask(WORDS, sampling=SHORT).read()


def answers(chat: pykvedge.Session, between) -> list[str]:
    """Returns the pieces of an answer. between() is called after each piece."""
    chat.clear()
    pieces = []
    for piece in chat.ask(WORDS * 6, sampling=LONG):
        pieces.append(piece)
        between()
    return pieces


def two_sessions(model: str, rpc: str, n: int) -> None:
    """Two sessions in one thread: after each token of the first, the second does one operation."""
    others = restless(model, rpc)
    with session(model, rpc) as chat:
        alone = answers(chat, lambda: None)
        for _ in range(0, n, len(alone)):
            assert answers(chat, lambda: next(others)) == alone
    others.close()


def two_threads(model: str, rpc: str, n: int) -> None:
    """Two threads with a session each."""
    with session(model, rpc) as chat:
        alone = answers(chat, lambda: None)

    def run():
        others = restless(model, rpc)
        with session(model, rpc) as chat:
            for i in range(n // 2):
                next(others)
                if i % 12 == 0:
                    assert answers(chat, lambda: None) == alone
        others.close()

    in_threads(run, run)


def two_sequences(model: str, rpc: str, n: int) -> None:
    """Two sequences in one context: sequence 1 is read, cut, copied and cleared while sequence 0 decodes."""
    ggml.add_server(rpc)
    assert answered(model, n, alone=False) == answered(model, n, alone=True)


def answered(model: str, n: int, alone: bool) -> list:
    """Returns the held tokens of sequence 0 after each answer of 16 tokens, n tokens in total."""
    context = OnDevices(model, None, n_seq=3)
    context.cache = libkvedge.Cache(context.context, pykvedge.plan("snapkv", 0.4), "f32", devices=DEVICES_ALL)
    others, held = itertools.cycle(changes(context)), []
    for _ in range(0, n, 16):
        context.llama.llama_memory_seq_rm(context.memory, 0, -1, -1)
        context.n[0] = 0
        context.decode(random_tokens(60))
        for token in random_tokens(16, seed=1):
            context.decode([token])
            if not alone:
                next(others)()
        held.append(context.held(0))
        assert context.cache.stats(0).device_bytes > 0
    context.close()
    return held


def changes(context: TinyContext) -> list:
    """Returns the operations on sequences 1 and 2, as functions."""
    memory, llama = context.memory, context.llama
    return [
        lambda: context.decode([], random_tokens(20)),
        lambda: context.decode([], [7]),
        lambda: context.decode([], [8]),
        lambda: llama.llama_memory_seq_cp(memory, 1, 2, -1, -1),
        lambda: llama.llama_memory_seq_rm(memory, 1, 15, 18),
        lambda: context.decode([], [9]),
        lambda: llama.llama_memory_seq_rm(memory, 1, -1, -1) and context.n.update({1: 0}),
        lambda: llama.llama_memory_seq_rm(memory, 2, -1, -1),
    ]


CASES = {case.__name__: case for case in (two_sessions, two_threads, two_sequences)}

if __name__ == "__main__":
    name, n, rpc, model = sys.argv[1:]
    CASES[name](model, rpc, int(n))
