"""Holds random answers to the schemas of the JSON Schema test suite, and has `jsonschema` say whether they obey.

    D="python3 scripts/dev.py python experiments/check_schemas.py MODEL.gguf JSON-Schema-Test-Suite/tests"
    $D                          # all schemas, without a server
    $D --serve 400 --seed 1     # so many of them, drawn by chance, through `kvedge serve`

The folder is that of https://github.com/json-schema-org/JSON-Schema-Test-Suite; the source package of `jsonschema` has
it as json/tests. A schema is obeyed, refused, or violated; the exit code is 1 if one is violated. Without a server each
token is drawn from those that may come, so the model is asked nothing: its vocabulary is enough. Through a server the
model answers at a high temperature. An answer that max_tokens cuts is completed here in the same way; it is counted as
cut where the whole obeys.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
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
_OTHER_REGEX = ("ecmascript-regex",)  # Python's regular expressions, which jsonschema asks, are not JavaScript's
Schema = dict[str, Any]


def schemas(folder: Path) -> Iterator[tuple[str, Schema]]:
    """Lists the schemas of the suite that are objects."""
    for draft, uri in DRAFTS.items():
        for file in sorted((folder / draft).rglob("*.json")):
            for case in json.loads(file.read_text()):
                if isinstance(case["schema"], dict) and file.stem not in _OTHER_REGEX:
                    yield f"{draft}/{file.stem}/{case['description']}", {"$schema": uri, **case["schema"]}


def asked(server: Server, model: Model, schema: Schema, seed: int) -> tuple[str, str]:
    """Asks a server for two answers. Returns "obeyed", "refused", "cut" or "violated", and why."""
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
            begun = text.rstrip("\ufffd").encode()  # of a character that is not whole
            verdict, text = "cut", _completed(model, schema, begun, random.Random(seed))
            if text is None:
                return "cut, not completed", repr(begun)
        why = fault(schema, text)
    except (GrammarError, ValueError) as error:
        why = str(error)
    return ("violated", f"{text!r}: {why}") if why else (verdict, "")


def _completed(model: Model, schema: Schema, begun: bytes, rng: random.Random) -> bytes | None:
    """Completes an answer. Returns None where no end was found. Raises GrammarError where it is no beginning."""
    for _ in range(20):
        grammar = Grammar(Sampling(json_schema=schema), model)
        for token in model.table().cut(begun):
            if grammar.take(token) is not None:
                raise GrammarError("the answer is no beginning of one")
        if (rest := walk(grammar, model, rng)) is not None:
            return begun + rest
    return None


def main() -> int:
    options = argparse.ArgumentParser(description="Holds random answers to the schemas of a test suite.")
    options.add_argument("model", type=Path)
    options.add_argument("folder", type=Path)
    options.add_argument("--serve", type=int, metavar="N", help="ask a server of the model for N of the schemas")
    options.add_argument("--seed", type=int, default=1, help="of the draw, and of answers (default %(default)s)")
    options.add_argument("--show", action="store_true", help="say of each schema that is not obeyed, why")
    given = options.parse_args()
    model, found = Model(given.model, vocabulary_only=True), list(schemas(given.folder))
    if given.serve is None:
        return told(found, lambda schema, i: judge(schema, model, i), given.show)
    drawn = random.Random(given.seed).sample(found, min(given.serve, len(found)))
    with serving(dict(os.environ), "--model", given.model, "--ctx", "512") as server:
        return told(drawn, lambda schema, i: asked(server, model, schema, given.seed + i), given.show)


def told(found: list[tuple[str, Schema]], verdict: Callable[[Schema, int], tuple[str, str]], show: bool) -> int:
    counts: Counter[str] = Counter()
    for i, (name, schema) in enumerate(found):
        how, why = verdict(schema, i)
        counts[how] += 1
        if how not in ("obeyed", "refused") or (show and how != "obeyed"):
            print(f"{how}: {name}: {why}", flush=True)
    print(dict(counts))
    return int(counts["violated"] > 0)


if __name__ == "__main__":
    sys.exit(main())
