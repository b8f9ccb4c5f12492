"""Runs the whole path on shapes of released families, with vocabularies and chat templates of llama.cpp's source.

    python3 scripts/dev.py python experiments/check_families.py --work DIR [--families A,B] [--layers 6] [--json]

The weights are random, so answers mean nothing: the check is about memory, tokens, prompts, file names and time. Each
family is in a local hub, under the names of its repository. The steps: `kvedge serve -hf`, with a picture and with a
schema; /tokenize and /apply-template against the references and jinja2; `kvedge fit` against the system's peak memory
of `kvedge chat`; a restored session against a continued session; `kvedge tune`. A row names the failed step. Exit code:
1 if a step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import scriptpath  # noqa: F401
from llama_source import ROOT, log
from modelgen.released import extract
from modelgen.shapes import SHAPES

sys.path.insert(0, str(ROOT / "tests"))
from hubs import environment
from hubserver import HubServer, StoredFile
from serve_load import picture
from server import serving
from test_released_models import BOS, CASES, EOS, MARKER, OTHERWISE, by_jinja2, references

# repository, model and image encoder, with their owners' names
NAMES = {
    "smolvlm-500m": ("ggml-org/SmolVLM-500M-Instruct-GGUF", "SmolVLM-500M-Instruct-Q8_0.gguf",
                     "mmproj-SmolVLM-500M-Instruct-Q8_0.gguf"),
    "qwen2.5-vl-3b": ("ggml-org/Qwen2.5-VL-3B-Instruct-GGUF", "Qwen2.5-VL-3B-Instruct-Q4_K_M.gguf",
                      "mmproj-Qwen2.5-VL-3B-Instruct-f16.gguf"),
    "qwen3-vl-2b": ("Qwen/Qwen3-VL-2B-Instruct-GGUF", "Qwen3VL-2B-Instruct-Q4_K_M.gguf",
                    "mmproj-Qwen3VL-2B-Instruct-F16.gguf"),
    "gemma-3-4b": ("ggml-org/gemma-3-4b-it-GGUF", "gemma-3-4b-it-Q4_K_M.gguf", "mmproj-model-f16.gguf"),
    "internvl3-1b": ("ggml-org/InternVL3-1B-Instruct-GGUF", "InternVL3-1B-Instruct-Q8_0.gguf",
                     "mmproj-InternVL3-1B-Instruct-Q8_0.gguf"),
    "lfm2-vl-1.6b": ("LiquidAI/LFM2-VL-1.6B-GGUF", "LFM2-VL-1.6B-Q4_0.gguf", "mmproj-LFM2-VL-1.6B-Q8_0.gguf"),
}  # fmt: skip
TOLD = {"HuggingFaceTB-SmolLM3-3B": "takes tools as xml_tools: they are told in the system text"}
SCENE = ROOT / "examples" / "scene-1.png"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "shapes": {"type": "array", "items": {
    "type": "object", "properties": {"colour": {"enum": ["red", "green", "blue"]}, "n": {"type": "integer"}},
    "required": ["colour", "n"]}}}, "required": ["name", "shapes"]}  # fmt: skip
SESSIONS = """
import json, sys, pykvedge
model, mmproj, scene, file = sys.argv[1:]
said = pykvedge.Sampling(max_tokens=6)
with pykvedge.load(model, mmproj, threads=1) as loaded:
    with pykvedge.Session(loaded, n_ctx=4096) as session:
        session.ask("What is this?", scene, said).read()
        session.save(file)
        went_on = session.ask("And now?", None, said).read()
    with pykvedge.Session(loaded, n_ctx=4096) as session:
        session.load(file)
        print(json.dumps([went_on, session.ask("And now?", None, said).read()]))
"""


def run(*command: object, env: dict[str, str] | None = None, codes: tuple[int, ...] = (0,), limit: float = 1800) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], env={**os.environ, **(env or {})}, text=True,
                          capture_output=True, timeout=limit, check=False)  # fmt: skip
    if done.returncode not in codes:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def kvedge(*arguments: object, **more: Any) -> str:
    return run("-m", "pykvedge", *arguments, **more)


def require(what: bool, why: object) -> None:
    if not what:
        raise RuntimeError(f"{why!s:.300}")


@contextlib.contextmanager
def hub_with(name: str, folder: Path, home: Path) -> Iterator[dict[str, str]]:
    """Yields the environment of a hub that has the family's repository."""
    repository, *files = NAMES[name]
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(HubServer())
        for source, called in zip(("model.gguf", "mmproj.gguf"), files, strict=True):
            file = stack.enter_context((folder / source).open("rb"))
            content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            said = hashlib.sha256(content).hexdigest()  # computed once, not in each listing
            hub.repos.setdefault(repository, {})[called] = StoredFile(content, said=said)  # type: ignore[arg-type]
        yield environment(hub, home)


def checked(row: dict[str, Any], name: str, check: Callable[[], object]) -> None:
    start = time.perf_counter()
    try:
        row[name] = check() or "yes"
    except Exception as error:  # the row names any error
        row[name], row["failed"] = f"NO: {error}", True
    log(f"{row['family']}: {name}: {row[name]} ({time.perf_counter() - start:.0f} s)")


def over_http(row: dict[str, Any], name: str, released: Path, env: dict[str, str]) -> None:
    """Tests by name, over HTTP: tokens, prompts, a picture, a schema."""
    of = SHAPES[name].released
    assert of is not None
    tag = re.search(r"(Q\d\w*)\.gguf", NAMES[name][1])
    program = ("-m", "pykvedge", "serve", "--port", "0", "--threads", "1", "--ctx", "4096")
    with serving(env, "-hf", f"{NAMES[name][0]}:{tag[1] if tag else ''}", program=program) as server:
        server.client.timeout = 1200
        post = lambda path, **body: server.client.post(path, json=body).raise_for_status().json()  # noqa: E731

        def tokens() -> str:
            told = references(released / f"ggml-vocab-{of.vocabulary}.gguf")
            for text, expected in told:
                require(post("/tokenize", content=text, parse_special=False)["tokens"] == expected, repr(text))
            return f"{len(told)} texts"

        def typed() -> None:
            for word in of.specials[:8]:
                prompt = post("/apply-template", messages=[{"role": "user", "content": "a b"}])["prompt"]
                asked = {"messages": [{"role": "user", "content": f"a{word}b"}], "max_tokens": 1}
                n = post("/v1/chat/completions", **asked)["usage"]["prompt_tokens"]
                before, _, after = prompt.partition("a b")
                parts = (post("/tokenize", content=x)["tokens"] for x in (before, after))
                text = post("/tokenize", content=f"a{word}b", parse_special=False)["tokens"]
                require(abs(n - sum(map(len, parts)) - len(text)) <= 1, f"{word}: {n} tokens, {len(text)} of the text")

        def prompts() -> str:
            template = by_jinja2((released / "templates" / f"{of.template}.jinja").read_text(encoding="utf-8"))
            same, asked = 0, 0
            for case, (messages, values) in CASES.items():
                if case in ("a result", "pictures"):  # the texts around pictures can be split in several ways
                    continue
                more = {"chat_template_kwargs": {k: v for k, v in values.items() if k != "tools"}}
                more |= {"tools": values["tools"]} if "tools" in values else {}
                written = post("/apply-template", messages=[shown(m) for m in messages], **more)["prompt"]
                written = re.sub(r"<__image_\w+__>", MARKER, written)
                expected = template.render(messages=messages, **values).replace(BOS, "").replace(EOS, of.end)
                why = OTHERWISE.get(of.template) or (case == "tools" and TOLD.get(of.template)) or ""
                is_same = written.removeprefix("<bos>") == expected.removeprefix("<bos>")
                require(is_same or why, f"{case}: {written!r} is not {expected!r}")
                same, asked = same + is_same, asked + 1
            return f"{same} of {asked} equal"

        def with_picture() -> str:
            start = time.perf_counter()
            asked = [picture(SCENE), {"type": "text", "text": "What is this?"}]
            usage = post("/v1/chat/completions", messages=[{"role": "user", "content": asked}], max_tokens=2)["usage"]
            row["prompt_tokens"] = usage["prompt_tokens"]
            return f"{usage['prompt_tokens']} tokens, {time.perf_counter() - start:.0f} s"

        def schema() -> str:
            seconds = []
            asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}
            for form in ({}, asked):
                start = time.perf_counter()
                body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **form}
                text = post("/v1/chat/completions", **body)["choices"][0]["message"]["content"]
                seconds.append(time.perf_counter() - start)
            require(text.lstrip()[:1] in ("", "{"), text)
            return f"{seconds[1]:.2f} s beside {seconds[0]:.2f}"

        for label, check in (("tokens", tokens), ("typed", typed), ("prompts", prompts), ("picture", with_picture),
                             ("schema", schema)):  # fmt: skip
            checked(row, label, check)


def shown(message: dict[str, Any]) -> dict[str, Any]:
    """Replaces the image mark in a text by a picture, in the form of requests."""
    if MARKER not in message["content"]:
        return message
    parts: list[dict[str, Any]] = []
    for i, text in enumerate(message["content"].split(MARKER)):
        parts += [picture(SCENE)] if i else []
        parts += [{"type": "text", "text": text.lstrip()}] if text else []
    return {**message, "content": parts}


def peak(folder: Path) -> str:
    """Compares the peak of `fit` with the system's record of the largest resident set."""
    model = ("-m", folder / "model.gguf", "--threads", 1, "--ctx", 4096, "--json", "--image", SCENE)
    ran = json.loads(kvedge("chat", *model, "--max-tokens", 2, "What is this?"))
    text = ran["tokens"]["prompt"] - ran["tokens"]["image"]
    said = json.loads(kvedge("fit", *model, "--text", text))
    require(said["image_tokens"] == ran["tokens"]["image"], f"image tokens {said['image_tokens']}, {ran['tokens']}")
    found, told = ran["rss"]["peak_bytes"], said["bytes"]["peak_prefill"]
    off = told / found - 1
    words = f"{off:+.1%} ({found / 1e6:.0f} MB)"
    require(abs(off) <= 0.05, f"{words}, {json.dumps(said['bytes'])}")
    return words


def session(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        out = run("-c", SESSIONS, folder / "model.gguf", folder / "mmproj.gguf", SCENE, Path(made) / "s.kvs")
    went_on, restored = json.loads(out)
    require(went_on == restored, f"{went_on!r} {restored!r}")


def tune(folder: Path, minutes: float) -> str:
    start = time.perf_counter()
    kvedge("tune", "-m", folder / "model.gguf", "--minutes", minutes, "--threads", 1, "--json", codes=(0, 1))
    taken = (time.perf_counter() - start) / 60
    require(taken < 1.5 * minutes + 1, f"{taken:.1f} min of {minutes}")
    return f"{taken:.1f} of {minutes:g} min"


def family(name: str, args: argparse.Namespace, released: Path) -> dict[str, Any]:
    folder, shape = args.work / name, SHAPES[name]
    assert shape.released is not None
    row: dict[str, Any] = {"family": name, "vocabulary": shape.released.vocabulary, "own": shape.released.own}
    if not (folder / "mmproj.gguf").exists():
        cut = ["--layers", args.layers, "--vision-layers", args.vision_layers] if args.layers else []
        run(ROOT / "scripts" / "make_shape_model.py", name, "-o", folder, "--released", released, "--force", *cut)
    row["files_bytes"] = sum(file.stat().st_size for file in folder.glob("*.gguf"))
    with tempfile.TemporaryDirectory(dir=args.work) as home, hub_with(name, folder, Path(home)) as env:
        checked(row, "hub and server", lambda: over_http(row, name, released, env))
    checked(row, "fit", lambda: peak(folder))
    checked(row, "session", lambda: session(folder))
    if args.minutes:
        checked(row, "tune", lambda: tune(folder, args.minutes))
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the models, which are made if missing")
    parser.add_argument("--families", default=",".join(NAMES), help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=6, help="of the model; 0: all (default %(default)s)")
    parser.add_argument("--vision-layers", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--minutes", type=float, default=1.0, help="of tune; 0: leave it out (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a family instead of the table")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    released = args.work / "released"
    if not released.exists():
        extract(released)
    rows = [family(name, args, released) for name in args.families.split(",")]
    if args.json:
        print("\n".join(map(json.dumps, rows)))
    else:
        from pykvedge.cli.tables import folded

        columns = ["family", "vocabulary", "tokens", "typed", "prompts", "picture", "schema", "fit", "session", "tune"]
        print(folded([columns, *([str(row.get(column, "-")) for column in columns] for row in rows)]))
    return int(any(row.get("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
