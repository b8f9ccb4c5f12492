"""Runs llama.cpp's own server tests against `kvedge serve`: how many pass, and why the others do not.

    python3 scripts/dev.py python experiments/check_llama_tests.py [FILE ...] [--json] [--only WORDS] [--jobs N]

The tests come from the pinned source distribution and run in a temporary folder. Their requirements are installed into
build/llama-tests. A small model with random weights replaces tinyllama-2, the packaged model replaces tinygemma3. A
test that meets other words or another number of tokens goes on, and counts as `model`. FILE: for example
test_completion.py; default: all. Exit code: 1 if a test is `ours`.

    model   the test needs the words, or the number of tokens, of a model on a hub
    option  it needs a route, an option or a field that kvedge decided against
    ours    anything else: a difference to mend
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections import Counter
from pathlib import Path
from typing import Any

import scriptpath  # noqa: F401 (makes scripts/ importable)
from llama_source import ROOT, VENDOR, fetch
from modelgen import tokens
from modelgen.text import TextSpec, text_model
from modelgen.writer import write_gguf

NEEDS = ("pytest~=8.3.3", "pytest-timeout", "pytest-xdist~=3.6", "filelock", "openai~=2.14.0", "requests")
FOLDERS = ("tools/server/tests", "models/templates", "tools/mtmd/test-1.jpeg")
CLASSES = ("model", "option", "ours")
# (class, reason, pattern of the failing line or error, pattern of tests); the first match counts
RULES: tuple[tuple[str, str, str, str], ...] = (
    ("model", "pictures on the hub", "status_code == 200", r"test_vision.*(IMG_URL_|token_count)"),
    ("model", "other words or lengths", r"== (n_prompt|n_token_output)", "cached_tokens|prompt_cache|short_prompt.-1"),
    ("option", "infill", "", "test_infill"),
    ("option", "LoRA", "", "test_lora"),
    ("option", "draft models", "", "test_speculative"),
    ("option", "several models", "", "test_router"),
    ("option", "proxy and MCP", "", "test_proxy|test_mcp_servers"),
    ("option", "llama-server's log", "", "test_kv_keep"),
    ("option", "/slots and /metrics are always there", "== 501", "slots|metrics"),
    ("option", "names of llama-server's metrics", "Process-Start-Time|expected_|llamacpp", "test_metrics"),
    ("option", "probabilities behind the samplers", "", "post_sampling"),
    ("option", "__verbose", "__verbose", ""),
    ("option", "the prompt as it was sent", r"== \"<s> \" \+ prompt", ""),
    ("option", "parts of another size", "== batch_count", "return_progress"),
    ("option", "wrong requests have status 400", "== 500", ""),
    ("option", "an empty conversation is refused", "", "anthropic_empty_messages"),
    ("option", "no timings in responses", "saw_progress", "responses"),
    ("option", "llama-server's page", "/sw.js", ""),
    ("option", "no cookies for pages of other origins", "cors_header|403", "cors_options"),
    ("option", "pages of other origins get status 400", "== 200", "cors_origins_localhost_rejects"),
    ("option", "file: URLs are whole paths; others are refused by 403", "403", "local_media"),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print each result as JSON")
    parser.add_argument("--only", metavar="WORDS", help="tests by name, as pytest -k takes it")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)  # writes a model with the template on stdin
    given = parser.parse_args()
    if given.make:
        make_model(given.make, sys.stdin.read())
        return 0
    with tempfile.TemporaryDirectory() as folder:
        unpack(Path(folder))
        results = run(Path(folder), given)
    if given.json:
        print(json.dumps(results, indent=1))
    else:
        show(results)
    return int(any(one.get("class") == "ours" for one in results))


def make_model(path: Path, template: str) -> None:
    """Writes a model that rarely ends an answer."""
    vocabulary = tokens.spm(640, template or tokens.CHATML, ("<|im_start|>", "<|im_end|>"))
    partial = path.with_suffix(".part")
    write_gguf(partial, *text_model(TextSpec("llama", vocabulary, 2, 4, 2, 32, 128, 8192)))
    partial.replace(path)


def unpack(folder: Path) -> None:
    """Unpacks the tests and their data files. Edits one check of the build's name."""
    with tarfile.open(fetch()) as archive:
        for member in archive:
            name = member.name.removeprefix(f"{VENDOR}/")
            if member.isfile() and name != member.name and name.startswith(FOLDERS):
                member.name = name
                archive.extract(member, folder, filter="data")
    for path in folder.glob("tools/server/tests/unit/*.py"):
        path.write_text(path.read_text().replace('startswith("b")', 'startswith(("b", "kvedge"))'))


def environment() -> Path:
    """Returns the Python of the tests' environment. Makes the environment if its requirements changed."""
    folder = ROOT / "build" / "llama-tests"
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    noted = folder / "needs.json"
    if not noted.is_file() or json.loads(noted.read_text()) != list(NEEDS):
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *NEEDS], check=True, stdout=sys.stderr)
        noted.write_text(json.dumps(NEEDS))
    return python


def run(folder: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the tests. Returns the result and class of each test."""
    tests, results = folder / "tools" / "server" / "tests", folder / "results"
    results.mkdir()
    (tests / "tmp").mkdir()
    scene = base64.b64encode((ROOT / "pykvedge" / "data" / "doctor.png").read_bytes()).decode()
    about = {"python": sys.executable, "maker": str(Path(__file__).resolve()), "scene": scene, "results": str(results)}
    paths = os.pathsep.join([str(tests), str(Path(__file__).parent)])
    variables = {**os.environ, "KVEDGE_LLAMA_TESTS": json.dumps(about), "PYTHONPATH": paths}
    command = [environment(), "-m", "pytest", "-q", "-p", "llama_stand_in", "-p", "no:cacheprovider", "--timeout=300"]
    command += ["-n", str(given.jobs)] if given.jobs > 1 else []
    command += ["-k", given.only] if given.only else []
    command += [f"unit/{name}" for name in given.files] or ["unit"]
    subprocess.run(command, cwd=tests, env=variables, stdout=sys.stderr, check=False)
    lines = [line for path in results.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted((classed(json.loads(line)) for line in lines), key=lambda one: str(one["test"]))


def classed(one: dict[str, Any]) -> dict[str, Any]:
    """Adds the class and the reason to a failed test."""
    if one["outcome"] != "failed":
        return {**one, "class": "model", "why": "other words or lengths, else right"} if one["words"] else one
    for kind, why, says, where in RULES:
        if re.search(where, one["test"]) and re.search(says, f"{one['line']} {one['error']}"):
            return {**one, "class": kind, "why": why}
    if "kind" in one:
        return {**one, "class": one["kind"], "why": one["what"]}
    return {**one, "class": "ours", "why": one["error"]}


def show(results: list[dict[str, Any]]) -> None:
    """Prints counts by file, the reasons, and the differences to mend."""
    rows: dict[str, Counter[str]] = {}
    for one in results:
        for name in (one["test"].partition("::")[0].removeprefix("unit/"), "all"):
            rows.setdefault(name, Counter())[one.get("class", one["outcome"])] += 1
    columns = ("passed", "skipped", *CLASSES)
    print(f"{'file':<30}", *(f"{name:>8}" for name in ("tests", *columns)))
    for name in sorted(rows, key=lambda name: (name == "all", name)):
        counts = rows[name]
        print(f"{name:<30}", *(f"{n:>8}" for n in (counts.total(), *(counts[column] for column in columns))))
    why = Counter((one["class"], one["why"]) for one in results if one.get("class") in CLASSES[:2])
    print("\nreasons:", *(f"{n:>5}  {kind:<7} {text}" for (kind, text), n in why.most_common()), sep="\n")
    for one in results:
        if one.get("class") == "ours":
            print(f"\n{one['test']}\n    {one['line']}\n    {one['error']}", *([one["route"]] if one["route"] else []))


if __name__ == "__main__":
    sys.exit(main())
