"""The attention provider against stock llama.cpp: same model, same prompts, nothing evicted, f16 keys and values.

Stock flash attention deviates by a few 1e-5 nats from attention in f32, more than the provider does. So the provider
must be close to stock with f32 keys and values, and within this noise of stock's default. Also, patched llama.cpp
without a provider must compute the same as stock llama.cpp, bit for bit.
"""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from choosing import whole

MAX_KL_EXACT = 1e-5  # nats
MAX_KL = 1e-4


@pytest.fixture
def logits(worker, stock_env, tmp_path):
    """logits(jobs, *sides) -> for each side {(model, number of the case): [steps, n_vocab]}.

    jobs: (model, cases) pairs. sides: "exact" and "stock" of unpatched libraries, or "patched" and "provider" of
    kvedge's. One process reads all jobs, because its start takes longer than a job.
    """

    def run(jobs, *sides):
        env = {"KVEDGE_WORKER": "ours"} if {"patched", "provider"} & {*sides} else stock_env
        out = tmp_path / f"{sides[0]}.npz"
        told = [{"model": str(model), "cases": cases} for model, cases in jobs]
        worker("decode_worker.py", {"sides": sides, "out": str(out), "jobs": told}, env=env)
        places = [(n, model, i) for n, (model, cases) in enumerate(jobs) for i in range(len(cases))]
        with np.load(out) as results:
            return [{(model.parent.name, i): results[f"{side}.{n}.{i}"] for n, model, i in places} for side in sides]

    return run


def tokens(n, seed=0, n_vocab=1000):
    return np.random.default_rng([seed, n]).integers(5, n_vocab, n).tolist()


def case(*segments, then=6, n_vocab=1000, **batching):
    """Returns a case. segments: a number of tokens, or (height, width) of an image. n_vocab: tokens are below it."""
    made = []
    for i, s in enumerate(segments):
        made.append({"tokens": tokens(s, i, n_vocab)} if isinstance(s, int) else {"image": [*s, i]})
    return {"segments": made, "then": tokens(then, 99, n_vocab), **batching}


def divergence(p_logits, q_logits):
    """Returns KL(p || q) of next-token distributions, per step, in nats."""
    p, q = p_logits.astype(np.float64), q_logits.astype(np.float64)
    p -= p.max(axis=-1, keepdims=True)
    q -= q.max(axis=-1, keepdims=True)
    log_p = p - np.log(np.exp(p).sum(axis=-1, keepdims=True))
    log_q = q - np.log(np.exp(q).sum(axis=-1, keepdims=True))
    return (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)


def assert_close(logits, *jobs):
    [ours] = logits(jobs, "provider")
    for found, limit in zip(logits(jobs, "exact", "stock"), (MAX_KL_EXACT, MAX_KL), strict=True):
        for case_of, a in found.items():
            b = ours[case_of]
            assert a.shape == b.shape and np.isfinite(b).all()
            assert divergence(a, b).max() <= limit, f"{limit}, {case_of}: {divergence(a, b)}"
            assert np.abs(a - b).max() <= 0.02 * np.abs(a).max(), f"{limit}, {case_of}"


TEXT = [case(n) for n in (1, 2, 3, 31, 32, 33, 255, 512, 513, 700)]
IMAGES = [
    case(5, (8, 8), 9),  # in the middle
    case((8, 8), 9),  # first
    case(9, (8, 8)),  # last
    case((6, 9)),  # alone
    case(1, (4, 4), 1, (5, 7), 1, (16, 3), 20),  # several
    case(30, (20, 30), 10),  # longer than a ubatch
]
SPLITS = [
    case(100, n_batch=7, n_ubatch=7),
    case(100, (10, 9), 40, n_batch=64, n_ubatch=16),
    case(513, n_batch=512, n_ubatch=128),  # the last batch has one token
    case(64, (8, 8), 64, n_batch=64, n_ubatch=64),
    case(33, (33, 33), 1, n_batch=2048, n_ubatch=33),
]
USUAL = ((4, 2), 80)  # heads, head size
SHAPES = itertools.product([(4, 4), (4, 2), (8, 1)], [64, 80, 96, 128])


def test_every_shape_of_attention(tiny, logits, pytestconfig):
    """One shape reads prompts of all lengths: shapes differ in how rows are multiplied, not in where they end."""
    jobs = []
    for heads, size in SHAPES:
        if pytestconfig.getoption("all") or heads == USUAL[0] or size == USUAL[1]:
            model = tiny("llama", n_heads=heads[0], n_heads_kv=heads[1], head_size=size).model
            text = TEXT if (heads, size) == USUAL else TEXT[4:7:2]
            jobs.append((model, [*text, IMAGES[0], SPLITS[1]]))
    assert_close(logits, *jobs)


def test_images_anywhere_and_batches_of_any_size(tiny, logits):
    """Batches of text alone are read by one model: M-RoPE differs at images."""
    images = [one for one in SPLITS if any("image" in segment for segment in one["segments"])]
    assert_close(logits, (tiny("llama").model, IMAGES + SPLITS), (tiny("qwen2vl").model, IMAGES + images))


def test_other_architectures(tiny, logits):
    jobs = []
    for kind in ("qwen3", "phi3", "gemma3", "lfm2", "llama4", "gemma3n", "gemma4e"):
        n = 400 if kind == "gemma3n" else 1000
        cases = [case(40, n_vocab=n), case(600, then=3, n_vocab=n), case(100, n_vocab=n, n_batch=16, n_ubatch=16)]
        jobs.append((tiny(kind).model, cases))
    assert_close(logits, *jobs)


@pytest.mark.parametrize("kind", ["llama", *whole("qwen2vl")])
def test_long_prompts_and_many_steps(tiny, logits, kind):
    assert_close(logits, (tiny(kind).model, [case(2200, then=3), case(200, (24, 24), 300, then=64)]))


def test_without_a_provider_nothing_changes(tiny, logits):
    cases = [case(1), case(300), case(100, n_batch=16, n_ubatch=16)]
    jobs = [(tiny(kind).model, [*cases, case(20, (9, 9), 20)]) for kind in ("llama", "qwen2vl")]
    jobs += [(tiny(kind).model, cases) for kind in ("gemma3", "lfm2", "mamba", "deepseek2")]
    [stock], [patched] = logits(jobs, "stock"), logits(jobs, "patched")
    for case_of, expected in stock.items():
        np.testing.assert_array_equal(patched[case_of], expected, err_msg=str(case_of))


def test_the_worker_runs_what_it_is_told_to(started, stock_dir):
    """The worker must load the right library, otherwise the comparisons above are meaningless."""
    code = "import os, llama_cpp.llama_cpp as l; print(os.path.realpath(l._lib._name))"
    loaded = started(program=("-c", code), env={"LLAMA_CPP_LIB_PATH": str(stock_dir)}).out
    assert Path(loaded.strip()).parent == Path(os.path.realpath(stock_dir))
    assert started(program=("-c", f"import pykvedge; {code}")).out not in ("", loaded)
