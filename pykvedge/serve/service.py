"""A Service is what all routes of a server share."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from pykvedge.errors import RequestError
from pykvedge.serve.asking import Defaults
from pykvedge.serve.engine import Engine
from pykvedge.serve.fetching import Fetching


@dataclass
class Service:
    """An engine under a name. fingerprint: of program and model, as clients are told."""

    engine: Engine
    defaults: Defaults
    name: str
    fingerprint: str
    strict: bool = False  # refuse requests that name another model
    watchers: int = 0  # of its events
    began: float = field(default_factory=time.time)
    looking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))  # requests that are unpacked
    fetching: Fetching = field(default_factory=Fetching)
    closing: asyncio.Event = field(default_factory=asyncio.Event)  # it goes down, and takes no more requests

    def check_model(self, name: str | None) -> None:
        """Raises RequestError for the name of another model, if the server is strict about it."""
        if self.strict and name not in (None, "", self.name):
            raise RequestError(
                404, f"there is no model '{name:.80}'; this server has {self.name}", "model_not_found", "model"
            )
