"""Random operations on several sequences, beside unpatched llama.cpp. scripts/random_walk.py runs for hours."""

import pytest
from choosing import whole
from random_walk import STEPS, TOLERANCE, walk


# gemma3 runs few steps: llama.cpp drops rows before a window, and a cut can need them
@pytest.mark.parametrize(("kind", "seed", "steps"), [
    ("llama", 1, STEPS // 3), ("qwen3", 2, STEPS // 8), ("gemma3", 3, 60),
    *whole(("llama", 1, STEPS // 2), ("qwen3", 2, STEPS // 2)),
])  # fmt: skip
def test_a_random_walk_computes_what_llama_cpp_does(tiny, environment, native, stock_dir, kind, seed, steps):
    n, worst = walk(tiny(kind, weight="f32").model, steps, seed, stock_dir, environment)
    assert n > steps and worst <= (1e-7 if kind == "gemma3" else TOLERANCE)


@pytest.mark.parametrize("steps", [STEPS // 8, *whole(STEPS)])
def test_with_rows_on_an_rpc_server(tiny, environment, native, stock_dir, own_server, steps):
    """llama.cpp computes on the host, kvedge on the server, where its attention is ggml's operations."""
    n, worst = walk(tiny("llama", weight="f32").model, steps, 3, stock_dir, environment, own_server.address)
    assert n > steps and worst <= TOLERANCE
