"""Tests random answers to the schemas of the JSON Schema test suite: `jsonschema` decides whether they are valid.

    D="python3 scripts/dev.py python experiments/check_schemas.py MODEL.gguf JSON-Schema-Test-Suite/tests"
    $D                          # all schemas, without a server
    $D --serve 400 --seed 1     # this number of random schemas, through `kvedge serve`
    $D --times 20               # the cost of a schema for its client and for others: 20 seconds each

The folder is that of https://github.com/json-schema-org/JSON-Schema-Test-Suite; the source package of `jsonschema` has
it as json/tests. A schema is obeyed, refused, or violated; the exit code is 1 if one is violated. Without a server,
each token is drawn from the allowed tokens, so only the model's vocabulary is used. Through a server, the model answers
at a high temperature. If max_tokens cuts an answer, it is completed here with random tokens; a valid whole counts as
cut.

--times prints milliseconds: the time for the vocabulary, once for each model; the delay of the first token by a new
schema; and the time of plain questions alone, beside four clients, and beside four clients that ask with schemas, each
with a new one. The clients get 32 tokens in both cases.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from server import Server, serving
from test_grammar_schemas import fault, judge, walk

from pykvedge import GrammarError, Sampling
from pykvedge.models.model import Model
from pykvedge.runtime.grammar import Grammar

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
_OTHER_REGEX = ("ecmascript-regex",)  # jsonschema uses Python's regular expressions, not JavaScript's
_TYPES = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object",
          type(None): "null"}  # fmt: skip
Schema = dict[str, Any]


def schemas(folder: Path) -> Iterator[tuple[str, Schema]]:
    """Yields (name, schema) for the schemas of the suite that are objects."""
    for draft, uri in DRAFTS.items():
        for file in sorted((folder / draft).rglob("*.json")):
            for case in json.loads(file.read_text()):
                if isinstance(case["schema"], dict) and file.stem not in _OTHER_REGEX:
                    schema = {"$schema": uri, **_typed(case["tests"]), **case["schema"]}
                    yield f"{draft}/{file.stem}/{case['description']}", schema


def _typed(tests: list[dict[str, Any]]) -> Schema:
    """Returns the types that the suite tests with valid and invalid values. Untyped schemas mostly allow numbers."""
    valid, invalid = ({_TYPES[type(t["data"])] for t in tests if t["valid"] is is_valid} for is_valid in (True, False))
    return {"type": sorted(valid & invalid)} if valid & invalid else {}


def asked(server: Server, model: Model, schema: Schema, seed: int) -> tuple[str, str]:
    """Asks a server for two answers. Returns "obeyed", "refused", "cut" or "violated", and the reason."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    said = [{"role": "user", "content": "Say anything."}]
    answer = server.chat(said, response_format=form, seed=seed, n=2, temperature=1.5, max_tokens=64)
    if answer.status_code == httpx.codes.BAD_REQUEST:
        return "refused", answer.json()["error"]["message"]
    verdicts = [_verdict(choice, model, schema, seed) for choice in answer.raise_for_status().json()["choices"]]
    order = ("violated", "cut, not completed", "cut", "obeyed")
    return min(verdicts, key=lambda verdict: order.index(verdict[0]))


def _verdict(choice: dict[str, Any], model: Model, schema: Schema, seed: int) -> tuple[str, str]:
    text, verdict = choice["message"]["content"], "obeyed"
    try:
        if choice["finish_reason"] == "length":
            begun = text.rstrip("\ufffd").encode()  # the last character can be incomplete
            verdict, text = "cut", _completed(model, schema, begun, random.Random(seed))
            if text is None:
                return "cut, not completed", repr(begun)
        why = fault(schema, text)
    except (GrammarError, ValueError) as error:
        why = str(error)
    return ("violated", f"{text!r}: {why}") if why else (verdict, "")


def _completed(model: Model, schema: Schema, begun: bytes, rng: random.Random) -> bytes | None:
    """Completes an answer; None: no end was found. Raises GrammarError if `begun` does not match the schema."""
    for _ in range(20):
        grammar = Grammar(Sampling(json_schema=schema), model)
        for token in model.table().cut(begun):
            if grammar.take(token) is not None:
                raise GrammarError("the answer is no beginning of one")
        if (rest := walk(grammar, model, rng)) is not None:
            return begun + rest
    return None


def body(n: int, with_schema: bool = False, **fields: Any) -> Schema:
    """Makes a request with a new question. With with_schema, its schema is also new."""
    out = {"messages": [{"role": "user", "content": f"What is in picture {n:06}?"}], "temperature": 0, **fields}
    if with_schema:
        shape = {"colour": {"enum": ["red", "green", "blue"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}}
        listed = {"type": "array", "minItems": 9, "items": {"type": "object", "properties": shape, "required": ["n"]}}
        named = {f"name_{n}": {"type": "string", "maxLength": 20}, "day": {"type": "string", "format": "date"},
                 "shapes": listed}  # fmt: skip
        schema = {"type": "object", "properties": named, "required": list(named)}
        out["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return out


def milliseconds(server: Server, asked: Schema) -> float:
    began = time.perf_counter()
    with httpx.Client(base_url=server.url, timeout=300) as client:
        client.post("/v1/chat/completions", json=asked).raise_for_status()
    return 1000 * (time.perf_counter() - began)


def beside(
    server: Server, numbers: Iterator[int], clients: int, form: Callable[[int], Schema], seconds: float
) -> list[float]:
    """Asks plain questions for some seconds, beside other clients. Returns the milliseconds of each question."""
    over = time.monotonic() + seconds

    def client() -> None:
        while time.monotonic() < over:
            milliseconds(server, form(next(numbers)))

    with ThreadPoolExecutor(clients + 1) as pool:
        others, took = [pool.submit(client) for _ in range(clients)], list[float]()
        while time.monotonic() < over:
            took.append(milliseconds(server, body(next(numbers), False, max_tokens=16)))
        for other in others:
            other.result()
    return took


def times(server: Server, model: Model, seconds: float) -> None:
    numbers, rounds = itertools.count(), 3
    began = time.perf_counter()
    Model(model.path, vocabulary_only=True).table()
    vocabulary = 1000 * (time.perf_counter() - began)
    pairs = [
        [milliseconds(server, body(next(numbers), schema, max_tokens=1)) for schema in (False, True)] for _ in range(41)
    ]
    later = sorted(with_one - without for without, with_one in pairs[1:])
    print(f"{model.n_vocab} tokens prepared in {vocabulary:.0f}; with a new schema the first token comes later by "
          f"{statistics.median(later):.1f}, at most {later[-1]:.1f}", flush=True)  # fmt: skip
    ends = {str(token): -100 for token in model.ends}  # answers have equal lengths: the end is forbidden
    forms = {"alone": (0, body), "beside four": (4, lambda n: body(n, False, max_tokens=32, logit_bias=ends)),
             "beside four with schemas": (4, lambda n: body(n, True, max_tokens=32))}  # fmt: skip
    took: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            took[name] += beside(server, numbers, *form, seconds / rounds)
    for name, all_of in took.items():
        middle, late = (statistics.quantiles(all_of, n=100)[i] for i in (49, 98))
        print(f"{name}, {len(all_of)} questions: mean {statistics.mean(all_of):.1f}, median {middle:.1f}, "
              f"99 of 100 {late:.1f}, longest {max(all_of):.1f}", flush=True)  # fmt: skip


def main() -> int:
    options = argparse.ArgumentParser(description="Holds random answers to the schemas of a test suite.")
    options.add_argument("model", type=Path)
    options.add_argument("folder", type=Path, nargs="?", help="of the suite")
    options.add_argument("--serve", type=int, metavar="N", help="ask a server of the model for N of the schemas")
    options.add_argument("--times", type=float, metavar="SECONDS", help="measure what schemas cost")
    options.add_argument("--seed", type=int, default=1, help="of the draw, and of answers (default %(default)s)")
    options.add_argument("--show", action="store_true", help="say of each schema that is not obeyed, why")
    given = options.parse_args()
    model = Model(given.model, vocabulary_only=True)
    if given.folder is None and given.times is None:
        options.error("the folder of the suite is missing")
    found = list(schemas(given.folder)) if given.folder else []
    if given.times is None and given.serve is None:
        return told(found, lambda schema, i: judge(schema, model, i), given.show)
    with serving(dict(os.environ), "--model", given.model, "--ctx", "512") as server:
        if given.times is not None:
            times(server, model, given.times)
            return 0
        drawn = random.Random(given.seed).sample(found, min(given.serve, len(found)))
        return told(drawn, lambda schema, i: asked(server, model, schema, given.seed + i), given.show)


def told(found: list[tuple[str, Schema]], verdict: Callable[[Schema, int], tuple[str, str]], show: bool) -> int:
    counts: Counter[str] = Counter()
    for i, (name, schema) in enumerate(found):
        how, why = verdict(schema, i)
        counts[how] += 1
        if how not in ("obeyed", "refused", "cut") or (show and how != "obeyed"):
            print(f"{how}: {name}: {why}", flush=True)
    print(dict(counts))
    return int(counts["violated"] > 0)


if __name__ == "__main__":
    sys.exit(main())
