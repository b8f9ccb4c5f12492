"""The child process runs the steps of one group, and says before each what it is about to do."""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

from pykvedge.errors import KvedgeError


def main(target: str, skip: list[str], parts: list[str]) -> None:
    """Runs the steps of a group but those named in `skip` and those of the parts in `parts`. Reports lines of JSON."""
    # libraries that write to stdout must not get between the lines
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")

    module, _, function = target.partition(":")
    say(begin="", part="")
    try:
        for step in getattr(importlib.import_module(module), function)():
            if step.name in skip and step.part not in parts:
                continue
            tried = step.part not in parts
            say(begin=step.name, part=step.part)
            fault, facts = "", None
            if tried:
                try:
                    facts = step.run(lambda detail: say(at=detail))
                except Exception as error:
                    fault = _text(error)
            say(end=step.name, fault=fault, facts=facts or {}, tried=tried)
    except Exception as error:
        say(end="", fault=_text(error), facts={}, tried=True)
    say(done=True)


def _text(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, KvedgeError) else f"{type(error).__name__}: {text}"
