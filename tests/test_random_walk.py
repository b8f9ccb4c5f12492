"""2000 random operations on several sequences, beside unpatched llama.cpp: scripts/random_walk.py goes on for hours."""

from __future__ import annotations

import pytest
from random_walk import STEPS, TOLERANCE, walk


@pytest.mark.parametrize(("kind", "seed"), [("llama", 1), ("qwen3", 2)])
def test_a_random_walk_computes_what_llama_cpp_does(tiny, environment, native, stock_dir, kind, seed):
    n, worst = walk(tiny(kind, weight="f32").model, STEPS // 2, seed, stock_dir, environment)
    assert n > STEPS // 2 and worst <= TOLERANCE
