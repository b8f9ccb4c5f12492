"""scripts/measure_overhead.py on a tiny model: what it prints, not how long things take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import measure_overhead
import measuring
import pytest

SCRIPT = Path(measure_overhead.__file__)


def run(environment, *arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def test_every_method_is_measured_against_full(tiny, environment, native):
    methods = ["knorm", "h2o", "lookm", "snapkv", "flashcache"]
    chosen = [x for m in methods for x in ("--method", m)]
    size = ["--tokens", 80, "--images", 2, "--image-tokens", 24, "--threads", 1, "--rounds", 1, "--compressions", 2]
    done = run(environment, tiny("llama").model, *chosen, *size, "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads(done.stdout)}
    assert list(rows) == methods
    for row in rows.values():
        assert row["prefill_full_s"] > 0 and row["compress_s"] > 0
        assert row["compress_percent"] == pytest.approx(100 * row["compress_s"] / row["prefill_full_s"])
        assert row["total_percent"] == pytest.approx(row["gather_percent"] + row["compress_percent"])
    # norms need nothing of the prompt's queries; column sums and windows are gathered while it is read
    assert rows["knorm"]["gather_percent"] == rows["flashcache"]["gather_percent"] == 0
    assert rows["h2o"]["gather_percent"] == rows["lookm"]["gather_percent"] != 0
    assert rows["snapkv"]["gather_percent"] not in (0, rows["h2o"]["gather_percent"])


def test_the_prompt_has_the_length_asked_for():
    parts = measuring.pieces(4, 576, 2560)
    assert sum(n for n, _ in parts) == 2560 and sum(n for n, image in parts if image) == 4 * 576
    assert [image for _, image in parts] == [False, True, True, True, True, False]


@pytest.mark.parametrize("arguments", [["none.gguf"], [__file__, "--tokens", 100, "--images", 1, "--image-tokens", 99]])
def test_what_cannot_be_measured_is_said_in_a_line(environment, arguments):
    done = run(environment, *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stdout == ""
