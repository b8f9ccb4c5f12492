"""The packaged model answers a question whose answer is known."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pykvedge
from pykvedge.doctor.steps import At, Step
from pykvedge.errors import UnsoundError
from pykvedge.plans.plan import Plan

PICTURE = "doctor.png"  # a scene that the model was not trained on
QUESTION = "Describe the image."
EXPECTED = (
    "a red triangle at the top left, a red circle at the middle centre, a pink circle at the bottom left, "
    "a yellow circle at the bottom centre, and the code 64UM3 at the top centre."
)


def steps() -> Iterator[Step]:
    """Makes a step with the whole cache, and one with a compressed one."""
    folder = Path(pykvedge.__file__).parent / "data"
    files = (folder / "demo-model.gguf", folder / "demo-mmproj.gguf")
    if not all(file.is_file() for file in files):
        yield Step("no files", _missing)
        return
    for plan in (pykvedge.plan("full"), pykvedge.default_plan()):
        name = "the whole cache" if plan.method == "full" else f"{plan.method} at {plan.budget}"
        yield Step(name, functools.partial(_ask, files, plan))


def _missing(at: At) -> None:
    raise UnsoundError(f"{Path(pykvedge.__file__).parent / 'data'} holds no demo model")


def _ask(files: tuple[Path, Path], plan: Plan, at: At) -> dict[str, Any]:
    from pykvedge.runtime.sampling import Sampling

    at("loading")
    with pykvedge.Session(files[0], files[1], plan) as session:
        at("answering")
        answer = session.ask(QUESTION, [files[0].parent / PICTURE], Sampling(max_tokens=120)).read().strip()
    if answer != EXPECTED:
        raise UnsoundError(f"answers '{answer}' instead of '{EXPECTED}'")
    return {"question": QUESTION, "answer": answer}
