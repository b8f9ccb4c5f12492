"""The first inputs of the fuzzers are valid, and every target accepts them. A finding is tried again."""

import os
import random
import re
import subprocess
import sys

import fuzz
import pytest
from conftest import ROOT
from fuzz_mutants import layout_of, mutate_header
from fuzz_readers import SEEDS, TARGETS, first_inputs

from pykvedge.errors import KvedgeError


def test_every_target_has_small_first_inputs():
    assert set(TARGETS) == set(fuzz.PYTHON)
    assert {path.stem for path in (ROOT / "native" / "fuzz").glob("fuzz_*.cpp")} == {f"fuzz_{n}" for n in fuzz.NATIVE}
    assert {path.name for path in SEEDS.iterdir()} == {*fuzz.PYTHON, *fuzz.NATIVE} - fuzz.FIRST.keys()
    for target in (*fuzz.PYTHON, *fuzz.NATIVE):
        sizes = [path.stat().st_size for path in first_inputs(target)]
        assert sizes and max(sizes) <= fuzz.LARGEST and sum(sizes) < 80 << 10, target


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_right_is_taken_and_what_is_not_refused(native, target):
    take, structured = TARGETS[target]
    for path in first_inputs(target):
        take(path.read_bytes())
    rng, refused = random.Random(1), 0
    for path in first_inputs(target) * 5:
        data = structured(path.read_bytes(), rng) if structured else path.read_bytes()[: rng.randrange(60)]
        try:
            take(data)
        except KvedgeError:
            refused += 1
    assert refused or target in ("mmproj", "dataset", "note", "wire", "tools")  # these targets catch errors themselves


def test_headers_are_changed_in_their_places():
    data = first_inputs("gguf")[0].read_bytes()
    found = layout_of(data)
    assert found.entries[0][0] == 24 and len(found.tensors) == int.from_bytes(data[8:16], "little")
    assert sum(found.tensors[-1]) <= len(data)
    mutants = [mutate_header(data, random.Random(i)) for i in range(200)]
    whole = [m for m in mutants if len(layout_of(m).tensors) == int.from_bytes(m[8:16], "little")]
    assert len(set(mutants)) > 190 and 50 < len(whole) < 200  # many mutants can still be read completely


def test_what_libfuzzer_writes_is_counted():
    out = fuzz.Outcome("x")
    text = "#2\tINITED cov: 5 ft: 7 corp: 1/1b exec/s: 0 rss: 9Mb\n#9\tNEW    cov: 8 ft: 12 corp: 3/9b lim: 4\n"
    out.add(text + "stat::number_of_executed_units: 11\nstat::peak_rss_mb: 42\n")
    out.add(text)  # output of a run that ended in the middle
    assert (out.executions, out.edges, out.features, out.inputs, out.most_mib) == (20, 8, 12, 3, 42)
    shown = fuzz.table([out]).splitlines()
    assert re.split(" +", shown[1])[:3] == ["x", "0", "20"]
    assert fuzz.reason(" === Uncaught Python exception: ===\nTypeError: no\n") == "TypeError: no"
    assert fuzz.reason("a.cpp:3:4: runtime error: shift\nSUMMARY: x\n") == "SUMMARY: x"


def test_findings_are_kept_and_end_the_program_with_1(tmp_path, monkeypatch):
    """A program that fails at once replaces the fuzzer."""
    program = tmp_path / "fuzz_plan"
    kept = '"$(echo "$@" | sed "s/.*artifact_prefix=\\([^ ]*\\).*/\\1/")crash-1"'
    program.write_text(f"#!/bin/sh\necho 'a.h:1: count >= 0'\necho x > {kept}\nexit 77\n")
    program.chmod(0o755)
    monkeypatch.setattr(fuzz, "WORK", tmp_path)
    found = fuzz.Run(5, tmp_path, tmp_path, dict(os.environ)).fuzz("plan")
    assert found.findings[0] == "a.h:1: count >= 0 (plan-crash-1)" and (tmp_path / "plan-crash-1").exists()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("again", [0, 70])
def test_a_machine_that_stood_still_is_no_finding(tmp_path, monkeypatch, again, seed):
    """An input that timed out is tried alone. again: the exit code of that trial."""
    program, kept = tmp_path / "fuzz_plan", tmp_path / "plan-timeout-1"
    once = tmp_path / "once"
    program.write_text(f"""#!/bin/sh
for last; do :; done
[ "$last" = {kept} ] && exit {again}
[ -e {once} ] && exit 0
touch {once} {kept}; echo 'ERROR: libFuzzer: timeout'; exit 70
""")
    program.chmod(0o755)
    monkeypatch.setattr(fuzz, "WORK", tmp_path)
    found = fuzz.Run(5, tmp_path, tmp_path, dict(os.environ), seed).fuzz("plan").findings
    assert len(found) == kept.exists() == (again != 0)


def test_a_seed_makes_a_run_that_can_be_repeated(tmp_path, monkeypatch):
    """A run with a seed stops after a fixed number of inputs, even on a faster machine."""
    assert set(fuzz.PACE) == set(fuzz.PYTHON) | set(fuzz.NATIVE)
    program = tmp_path / "fuzz_plan"
    program.write_text('#!/bin/sh\necho "$@"\necho stat::number_of_executed_units: 26000\n')
    program.chmod(0o755)
    monkeypatch.setattr(fuzz, "WORK", tmp_path)
    for seed, runs in ((1, "26000"), (0, "-1")):
        assert fuzz.Run(2, tmp_path, tmp_path, dict(os.environ), seed).fuzz("plan").executions == 26000
        asked = (tmp_path / "plan.log").read_text().split()
        assert f"-seed={seed}" in asked and f"-runs={runs}" in asked


def test_options_that_cannot_be():
    for args in (["--target", "nothing"], ["--seconds", "x"]):
        done = subprocess.run([sys.executable, ROOT / "scripts" / "fuzz.py", *args], capture_output=True, text=True)
        assert done.returncode == 2 and "Traceback" not in done.stderr
