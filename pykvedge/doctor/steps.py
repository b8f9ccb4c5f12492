"""Groups of steps are checked. A group runs in a child process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pykvedge

At = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """A step is tried. `run(at)` calls at(detail) as it goes on, returns facts or None, raises if unsound.

    part: what steps have in common that would crash together; after some crashes the rest of a part is not tried.
    """

    name: str
    run: Callable[[At], dict[str, Any] | None]
    part: str = ""


@dataclass(frozen=True)
class Group:
    """A group has steps of one kind.

    target: "module:function", which the child calls for an iterable of steps. subject: how a step is spoken of, with
    its name in place of {}. remedies: what to do, by part; "" is for every other part.
    """

    name: str
    target: str
    subject: str
    remedies: dict[str, str] = field(default_factory=dict)
    patience_s: float = 120.0  # without a word from the child, it hangs


@dataclass(frozen=True)
class Outcome:
    """This became of a step. fault: empty if it is sound. tried: false where the part had crashed too often."""

    group: Group
    name: str
    part: str = ""
    fault: str = ""
    at: str = ""
    crashed: bool = False
    tried: bool = True
    facts: dict[str, Any] = field(default_factory=dict)


def _build(option: str = "") -> str:
    """Says how to build again, from a clone or from an installed package."""
    if (Path(pykvedge.__file__).resolve().parent.parent / "scripts" / "dev.py").is_file():
        return f"build again with python3 scripts/dev.py build {f'-D{option}' if option else ''}".rstrip()
    how = f" with -C cmake.define.{option}" if option else ""
    return f"install kvedge again from its source on this machine{how}"


def groups() -> list[Group]:
    """Lists everything that `kvedge doctor` checks, in this order."""
    here = "pykvedge.doctor"
    again = f"the libraries do not fit this processor; {_build()}"
    return [
        Group("libraries", f"{here}.libraries:steps", "{}", {"": _build()}),
        Group("kernels", f"{here}.libraries:kernels", "kernels {} of libkvedge", {"": again}),
        Group(
            "products",
            f"{here}.products:steps",
            "products of {}",
            {
                "AMX": _build("KVEDGE_AMX=OFF"),
                "CPU_REPACK": _build("GGML_CPU_REPACK=OFF"),
                "CPU": _build("GGML_NATIVE=OFF"),
                "": again,
            },
        ),
        Group("model", f"{here}.example:steps", "the packaged model with {}", {"": again}),
    ]


def interpreter(target: str, skip: list[str], parts: list[str]) -> list[str]:
    """Makes the command of a child, which imports what this process imports from the same places."""
    code = (
        "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given.pop('path'); "
        "from pykvedge.doctor.child import main; main(**given)"
    )
    given = {"path": sys.path, "target": target, "skip": skip, "parts": parts}
    return [sys.executable, "-c", code, json.dumps(given)]
