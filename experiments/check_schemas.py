"""Holds random answers to the schemas of the JSON Schema test suite, and has `jsonschema` say whether they obey.

    python3 experiments/check_schemas.py MODEL.gguf JSON-Schema-Test-Suite/tests

The folder is that of https://github.com/json-schema-org/JSON-Schema-Test-Suite; the source package of `jsonschema` has
it as json/tests. A schema is obeyed, refused, or violated; the exit code is 1 if one is violated. Of an answer each
token is drawn from those that may come, so the model is asked nothing: its vocabulary is enough.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from test_grammar_schemas import judge

from pykvedge.models.model import Model

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
_OTHER_REGEX = ("ecmascript-regex",)  # Python's regular expressions, which jsonschema asks, are not JavaScript's


def schemas(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lists the schemas of the suite that are objects."""
    for draft, uri in DRAFTS.items():
        for file in sorted((folder / draft).rglob("*.json")):
            for case in json.loads(file.read_text()):
                if isinstance(case["schema"], dict) and file.stem not in _OTHER_REGEX:
                    yield f"{draft}/{file.stem}/{case['description']}", {"$schema": uri, **case["schema"]}


def main() -> int:
    options = argparse.ArgumentParser(description="Holds random answers to the schemas of a test suite.")
    options.add_argument("model", type=Path)
    options.add_argument("folder", type=Path)
    options.add_argument("--show", action="store_true", help="say of each schema that is refused, why")
    given = options.parse_args()
    model = Model(given.model, vocabulary_only=True)
    counts: Counter[str] = Counter()
    for i, (name, schema) in enumerate(schemas(given.folder)):
        verdict, why = judge(schema, model, i)
        counts[verdict] += 1
        if verdict == "violated" or (given.show and verdict != "obeyed"):
            print(f"{verdict}: {name}: {why}")
    print(dict(counts))
    return int(counts["violated"] > 0)


if __name__ == "__main__":
    sys.exit(main())
