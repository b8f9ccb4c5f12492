"""Uses one object from two threads, and prints the result of each round as a JSON line. Separate process: it may crash.

thread_worker.py CASE ROUNDS MODEL
"""

import json
import sys
import threading
import time
from pathlib import Path

import pykvedge
from pykvedge import CancelledError, Sampling

WORDS = "The quick brown fox jumps over the lazy dog and looks at the picture. "
LONG = Sampling(max_tokens=400)


def outcome(call):
    """Returns the result of `call`, or the name of its exception."""
    try:
        return call()
    except (pykvedge.KvedgeError, CancelledError) as error:
        return type(error).__name__


def together(*calls):
    """Runs each call in a thread; all start together. Returns the results, or "stuck"."""
    ready, results = threading.Barrier(len(calls)), [None] * len(calls)

    def run(i):
        ready.wait()
        results[i] = outcome(calls[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return "stuck" if any(thread.is_alive() for thread in threads) else results


def session(model):
    return pykvedge.Session(model, plan=pykvedge.plan("snapkv", 0.4), threads=1, n_ctx=4096)


def two_ask(model, i):
    """Two threads ask in one session. Afterwards the session still answers."""
    with session(model) as chat:
        texts = together(*(lambda: chat.ask(WORDS * 20, sampling=Sampling(max_tokens=20)).read() and "answered",) * 2)
        return [*texts, outcome(lambda: chat.ask("And?", sampling=Sampling(max_tokens=3)).read() and "goes on")]


def others_while_streaming(model, i):
    """One thread reads an answer piece by piece; another thread calls other methods."""
    with session(model) as chat:
        answer, running = chat.ask(WORDS * 5, sampling=LONG), threading.Event()

        def read():
            for _ in answer:
                running.set()
            return "answered"

        def disturb():
            running.wait()
            seen = set()
            for call in (
                lambda: chat.set_plan(pykvedge.plan("h2o", 0.3)) or "took over",
                lambda: chat.save(Path(model).with_suffix(".kvs")) and "took over",
                lambda: chat.engine.cache.stats() and "seen",
            ):
                seen.add(outcome(call))
            return sorted(seen)

        return together(read, disturb)


def close_while_streaming(model, i):
    """Closes a session while another thread streams its answer."""
    chat = session(model)
    answer, running = chat.ask(WORDS * 5, sampling=LONG), threading.Event()

    def read():
        for _ in answer:
            running.set()
        return "answered"

    def close():
        running.wait()
        time.sleep(0.0007 * (i % 10))
        chat.close()
        return "closed"

    return [*together(read, close), outcome(lambda: chat.ask("And?"))]


def close_while_asking(model, i):
    """Closes a session while another thread reads a prompt."""
    chat = session(model)
    asking = threading.Event()

    def ask():
        asking.set()
        return chat.ask(WORDS * 60, sampling=LONG).read() and "answered"

    def close():
        asking.wait()
        time.sleep(0.003 * (i % 10))
        chat.close()
        return "closed"

    return together(ask, close)


def llama(model):
    from llama_cpp import Llama

    llm = Llama(model, n_ctx=2048, n_threads=1, n_threads_batch=1, verbose=False)
    return llm, pykvedge.attach(llm, "snapkv", 0.4)


def complete(llm, n):
    return llm(WORDS * 20, max_tokens=n, temperature=0.0)["choices"][0]["finish_reason"] and "answered"


def two_complete(model, i):
    """Two threads use one attached model. Afterwards the model still answers."""
    llm, _ = llama(model)
    texts = together(lambda: complete(llm, 20), lambda: complete(llm, 20))
    after = outcome(lambda: complete(llm, 3))
    llm.close()
    return [*texts, after]


def leave_while_completing(model, i, leave):
    llm, attached = llama(model)
    running = threading.Event()

    def read():
        for _ in llm(WORDS * 5, max_tokens=300, temperature=0.0, stream=True):
            running.set()
        return "answered"

    def go():
        running.wait()
        time.sleep(0.0007 * (i % 10))
        leave(llm, attached)
        return "left"

    seen = [*together(read, go), outcome(lambda: attached.stats() and "seen")]
    llm.close()
    return seen


def detach_while_completing(model, i):
    """Detaches the model while another thread generates."""
    return leave_while_completing(model, i, lambda llm, attached: attached.detach())


def close_while_completing(model, i):
    """Calls llm.close() while another thread generates."""
    return leave_while_completing(model, i, lambda llm, attached: llm.close())


def stats_while_decoding(model, i):
    """Reads stats of libkvedge's cache during llama_decode in another thread, then detaches."""
    sys.path.insert(0, str(Path(__file__).parent))
    from contexts import TinyContext, random_tokens

    context, seen, decoding = TinyContext(model, pykvedge.plan("h2o", 0.4)), set(), threading.Event()

    def decode():
        for j in range(6):
            decoding.set()
            context.decode(random_tokens(300, j))
        decoding.clear()
        return "decoded"

    def look():
        decoding.wait()
        while decoding.is_set():
            seen.add(outcome(lambda: context.cache.stats() and "seen"))
        return sorted(seen)

    results = together(decode, look)
    context.close()
    return results


CASES = {f.__name__: f for f in (
    two_ask, others_while_streaming, close_while_streaming, close_while_asking, two_complete, detach_while_completing,
    close_while_completing, stats_while_decoding,
)}  # fmt: skip


def main() -> None:
    case, rounds, model = sys.argv[1:]
    for i in range(int(rounds)):
        print(json.dumps(CASES[case](model, i)), flush=True)


if __name__ == "__main__":
    main()
