"""scripts/soak.py: many chats and images in one process, and its verdict about a process that grows."""

import sys
from pathlib import Path

import pytest
import soak

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "soak.py"
MIB = 2**20


def samples(private=(), **others):
    """Returns one sample for each number of bytes. Other figures are lists or constant."""
    figures = {"handles": 8, "threads": 2, "children": 0, **others}
    at = {name: value if isinstance(value, list) else [value] * len(private) for name, value in figures.items()}
    return [
        soak.Sample("chats", i, 0.0, n, **{name: values[i] for name, values in at.items()})
        for i, n in enumerate(private)
    ]


def test_what_counts_as_growth():
    flat = [40 * MIB] * 30
    assert soak.grown(samples(flat)) == {}
    assert soak.grown(samples([30 * MIB] * 5 + flat[5:])) == {}  # grows until caches are full
    assert soak.grown(samples([n + i % 7 * MIB for i, n in enumerate(flat)])) == {}  # pages that come and go
    assert soak.grown(samples([n + i * MIB // 4 for i, n in enumerate(flat)])).keys() == {"private_bytes"}
    assert soak.grown(samples(flat, handles=[8 + i // 10 for i in range(30)])) == {"handles": 2}
    assert soak.grown(samples(flat, threads=[2] * 20 + [3] * 10, children=[0] * 20 + [1] * 10)) == {
        "threads": 1,
        "children": 1,
    }
    assert soak.grown(samples(flat[:9], handles=list(range(9)))) == {}  # too few samples


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc_trim")
def test_nothing_grows_over_a_few_chats_and_images(started, native, tiny):
    model = tiny("llava")
    options = ["--model", model.model, "--mmproj", model.mmproj, "--chats", "12", "--images", "12", "--json"]
    done = started(*options, program=(SCRIPT,))
    assert done.code == 0, done
    said = done.json
    assert said["grown"] == {"chats": {}, "images": {}}
    assert [s["done"] for s in said["samples"] if s["part"] == "chats"][-1] == 12
    assert [s["done"] for s in said["samples"] if s["part"] == "images"][-1] == 12
    assert all(s["private_bytes"] > MIB and s["handles"] > 2 and s["threads"] > 0 for s in said["samples"])


def test_a_handle_that_is_left_behind_is_found(environment, started, native, tiny):
    """Each chat opens a file that is never closed."""
    code = (
        "import os, sys, soak\n"
        "one = soak.chat\n"
        "def leaking(*arguments):\n"
        "    os.dup(0)\n"
        "    one(*arguments)\n"
        "soak.chat = leaking\n"
        "sys.exit(soak.main())\n"
    )
    path = {"PYTHONPATH": f"{SCRIPT.parent}:{environment['PYTHONPATH']}"}
    options = ["--model", tiny("llama").model, "--chats", "12", "--images", "0"]
    done = started(*options, program=("-c", code), env=path)
    assert done.code == 1 and "chats: grown: handles by" in done.out, done
