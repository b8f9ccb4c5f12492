"""Completion with Tab: through click's protocol for shells, and in bash."""

import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner
from hubs import REPO, Place, environment, fill
from hubserver import HubServer

import pykvedge
from pykvedge.cli.program import cli


@pytest.fixture
def completed(tmp_path):
    """completed("chat --meth", ...) -> the possible last words. "file": the shell completes files."""

    def ask(line, **env):
        words = line.split(" ")
        asked = {"_KVEDGE_COMPLETE": "bash_complete", "COMP_WORDS": f"kvedge {line}", "COMP_CWORD": str(len(words))}
        done = CliRunner().invoke(cli, [], "", {**asked, "HF_HUB_CACHE": str(tmp_path), **env}, prog_name="kvedge")
        assert done.exit_code == 0 and done.stderr == "", done
        found = [one.split(",", 1) for one in done.stdout.split()]
        return {value if kind == "plain" else kind for kind, value in found}

    return ask


def test_what_is_completed(completed):
    assert {"chat", "completion", "config"} <= completed("c")
    assert {"--method", "--metrics"} == completed("eval --met")
    assert completed("chat --method lo") == {"lookm"}
    assert completed("chat --method ") == set(pykvedge.methods())
    assert completed("bench --method h2o,lo") == {"h2o,lookm"}
    assert completed("chat --method lookm --reducer piv") == {"pivotal"}
    assert "scorer.window=" in completed("chat --method snapkv --set scorer.w")
    assert completed("chat --method streaming-llm --set scorer.w") == set()
    assert completed("chat --kv-type q") == {"q8_0", "q4_0"}
    assert completed("config set gpu") == {"gpu-layers"}
    for line in ("chat --image ", "chat --model ", "run ", "eval "):
        assert completed(line) == {"file"}, line


def test_models_in_the_cache_are_completed(completed, kvedge, tiny, tmp_path):
    with HubServer() as hub:
        fill(hub, tiny("llava"))
        place = Place(hub, tmp_path, environment(hub, tmp_path))
        assert kvedge("pull", REPO, env=place.env).code == 0
    cache = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    for line in ("run ti", "chat -hf ", "chat --model tiny/", "rm t", "eval -hf ti"):
        assert completed(line, **cache) == {f"{REPO}:Q4_K_M"}, line
    assert completed("run other", **cache) == {"file"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_script_completes_in_bash(kvedge, environment, tmp_path):
    script = kvedge("completion", "bash")
    assert script.code == 0 and "_KVEDGE_COMPLETE" in kvedge("completion", "zsh").out
    program = tmp_path / "kvedge"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m pykvedge "$@"\n')
    program.chmod(0o755)
    line = (
        f'COMP_WORDS=({program} chat --method lo); COMP_CWORD=3; _kvedge_completion {program}; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        ["bash", "-c", f"{script.out}\n{line}"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "lookm\n" and done.stderr == ""
    kvedge("completion", "tcsh").failed(2, "'tcsh' is not one of")
