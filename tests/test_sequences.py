"""Several sequences in one context, and what llama.cpp's memory calls do to them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_provider import divergence

WORKER = Path(__file__).parent / "sequence_worker.py"


def run(environment, model, method, out, stock_dir=None):
    env = dict(environment)
    if stock_dir is not None:
        env.pop("KVEDGE_LIB_DIR", None)
        env["LLAMA_CPP_LIB_PATH"] = str(stock_dir)
    command = [sys.executable, str(WORKER), str(model), str(out), method]
    done = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_copies_cuts_and_clears_as_in_llama_cpp(environment, stock_dir, tiny, tmp_path, kind):
    model = tiny(kind).model
    run(environment, model, "stock", tmp_path / "stock.npy", stock_dir)
    run(environment, model, "full", tmp_path / "ours.npy")
    stock, ours = np.load(tmp_path / "stock.npy"), np.load(tmp_path / "ours.npy")
    assert stock.shape == ours.shape and len(stock) == 19
    assert divergence(stock, ours).max() <= 1e-4


def test_each_sequence_is_compressed_when_its_answer_begins(environment, tiny, tmp_path):
    before, after = (json.loads(line) for line in run(environment, tiny("llama").model, "h2o", tmp_path).splitlines())
    lengths = [set(np.ravel(heads)) for heads in before["lengths"]]
    assert lengths == [{20 + 1}, {300}, {11 + 1}]  # a fifth, and the first token of the answer
    assert before["tokens"] == sorted(set(before["tokens"])) and before["tokens"][-1] == 57
    assert after["tokens"] == [t for t in before["tokens"] if t < 40]
    assert [set(np.ravel(heads)) for heads in after["lengths"][:2]] == lengths[:2]
