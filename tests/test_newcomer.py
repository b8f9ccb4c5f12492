"""From a clean machine to an answer about a user's picture, only with the commands of the README."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from docpages import ROOT, blocks, fill_hub
from hubs import environment as hub_environment
from hubserver import HubServer

BEGIN = (ROOT / "README.md").read_text("utf-8").partition("\n## What you gain")[0]


def commands() -> list[str]:
    """Returns the commands that install kvedge and ask a real model by name, in the README's order."""
    shown = [block for block in blocks(ROOT / "README.md") if block.language == "sh" and block.text in BEGIN]
    return [line for block in shown for line in block.text.splitlines()]


def test_four_commands_and_none_from_another_page():
    said = [step for line in commands() for step in line.split(" && ")]
    assert len(said) <= 4 and "pip install" in said[-2], said
    assert re.search(r"kvedge run \w[\w.-]*/\w[\w.-]*GGUF:\w+ --image photo.jpg", said[-1])


@pytest.mark.whole
def test_a_newcomer_gets_an_answer(tmp_path, environment, kvedge, native):
    """A new home and environment, on a machine with the README's packages, and with a local hub.

    The packaged model has the real model's name. Its files give the expected answer for the same picture.
    """
    picture = ROOT / "photo.jpg"  # the newcomer's picture
    assert not picture.exists()
    variables = {**os.environ, "HOME": str(tmp_path)}
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        variables.pop(name, None)
    lines = commands()
    with HubServer() as hub:
        fill_hub(hub)
        variables.update(hub_environment(hub, tmp_path / "hf"))
        shutil.copy(ROOT / "examples" / "photo.jpg", picture)
        try:
            begun = time.monotonic()
            done = subprocess.run(
                ["bash", "-ec", "\n".join(lines)], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
            )
            asked = re.search(r'"(.+)"$', lines[-1])
            files = kvedge("chat", "--image", picture, asked[1])
        finally:
            picture.unlink()
    assert done.returncode == 0, done.stderr[-3000:]
    assert files.code == 0 and done.stdout.endswith(files.out), (done.stdout[-500:], files.out)
    print(f"{len(lines)} lines, {time.monotonic() - begun:.0f} s: {files.out.strip()}", file=sys.stderr)
