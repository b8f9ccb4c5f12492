"""Runs scripts/measure_device.py and experiments/try_device.py (scripts/check_imports.py reads the imports of all)."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def test_a_device_is_measured(environment, native, tiny, tmp_path):
    """The device's code on the CPU, against stock llama.cpp."""
    out, picture = tmp_path / "rows.json", tmp_path / "rows.svg"
    runs = ["--run", "128x1:knorm"]
    asked = ["--model", tiny("llama").model, "--device", "CPU", *runs, "--json"]
    done = subprocess.run(
        [sys.executable, SCRIPTS / "measure_device.py", *asked, "--generate", "4", "--output", out, "--plot", picture],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = json.loads(done.stdout)
    assert [(row["tokens"], row["variant"]) for row in rows] == [
        (128, name) for name in ("stock", "full", "knorm 0.2")
    ]
    stock, full, knorm = rows
    assert stock["device_bytes"] == 0 and 0 < knorm["device_bytes"] < 0.5 * full["device_bytes"]
    assert all(row["later_s"] > 0 and row["first_token_vs_stock"] > 0 for row in rows)
    assert json.loads(out.read_text())[0]["model"] == rows[0]["model"] and "knorm 0.2" in picture.read_text()


def test_a_method_that_is_none_is_refused_before_anything_is_built(environment):
    asked = [SCRIPTS.parent / "experiments" / "try_device.py", "vulkan", "--method", "nonsense"]
    done = subprocess.run([sys.executable, *asked], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--method: invalid choice: 'nonsense'" in done.stderr, done.stderr
