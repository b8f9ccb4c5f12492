"""A child process renders the templates whose work is not bounded, and is ended when it takes too long or too much.

Bounds inside of this process would not do: a single product or format of a template allocates without end in C, where
nothing can be intercepted. The child starts with the first such prompt, which takes a tenth of a second, and stays for
the conversation; a prompt then costs what it costs here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from pykvedge.errors import ModelError
from pykvedge.models import jinja_worker
from pykvedge.models.child import Child

PATIENCE = 10.0  # seconds for one prompt
_MOST_ANSWER = 8 * jinja_worker.MOST_OUTPUT  # bytes of JSON, where a character may be six


class Sandbox:
    """Runs one template in a child process. It is for one thread at a time."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._child: Child | None = None

    def render(self, values: dict[str, Any]) -> str:
        """Raises TemplateError, as the template does; ModelError where the template had to be ended."""
        return str(self._ask({"source": self._source, "values": values})["text"])

    def describe(self, library: str, request: dict[str, Any]) -> dict[str, Any]:
        """Finds the template's dialect (jinja_worker.describe). Raises as `render` does."""
        return dict(self._ask({"library": library, "describe": {"template": self._source, **request}})["dialect"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._child is None or not self._child.alive:
            self._child = _start()
        answer, why = self._child.ask(request, PATIENCE, _MOST_ANSWER)
        if answer is None:
            raise ModelError(_failed(why))
        if "error" in answer:
            raise TemplateError(answer["error"])
        if "fatal" in answer:
            raise ModelError(_failed(answer["fatal"]))
        return answer


def _failed(why: str) -> str:
    return f"the model's chat template fails: {why}; convert the model again, or use another one"


def _start() -> Child:
    try:
        return Child(str(Path(jinja_worker.__file__).resolve()), jinja_worker.MEMORY)
    except OSError as error:
        raise ModelError(f"the model's chat template cannot be run: {error.strerror or error}") from None
