"""Random operations on several sequences, beside unpatched llama.cpp: scripts/random_walk.py goes on for hours."""

import pytest
from choosing import whole
from random_walk import STEPS, TOLERANCE, walk


@pytest.mark.parametrize(("kind", "seed"), [("llama", 1), *whole(("qwen3", 2))])
def test_a_random_walk_computes_what_llama_cpp_does(tiny, environment, native, stock_dir, kind, seed):
    n, worst = walk(tiny(kind, weight="f32").model, STEPS // 2, seed, stock_dir, environment)
    assert n > STEPS // 2 and worst <= TOLERANCE


@pytest.mark.parametrize("steps", [STEPS // 3, *whole(STEPS)])
def test_with_rows_on_an_rpc_server(tiny, environment, native, stock_dir, own_server, steps):
    """llama.cpp computes on the host, kvedge on the server, with attention that is ggml's own operations."""
    n, worst = walk(tiny("llama", weight="f32").model, steps, 3, stock_dir, environment, own_server.address)
    assert n > steps and worst <= TOLERANCE
