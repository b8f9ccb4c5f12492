"""Defines a Job, one answer that a client waits for, its events, and the Limits of a server."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from pykvedge.models.dialect import Dialect
from pykvedge.models.images import Picture
from pykvedge.models.prompt import Message
from pykvedge.plans.plan import Plan
from pykvedge.reference.kvtypes import KvType
from pykvedge.runtime.logprobs import Token
from pykvedge.runtime.report import Report
from pykvedge.runtime.sampling import Sampling
from pykvedge.runtime.settings import Keep

READING = "reading the prompt"  # name of a step


@dataclass(frozen=True)
class Limits:
    """Limits of a server. n_ctx: tokens of one conversation. queue: most waiting requests.

    memory: bytes of keys and values of all conversations. share_prompts: owners of different keys share read prompts.
    keep: where whole rows stay behind compressed rows; None: nowhere. lookup: an answer that is decoded alone is
    drafted from earlier text of its conversation. exact: answers are drafted over compressed rows, and verified over
    whole rows.
    """

    slots: int = 4
    n_ctx: int = 4096
    memory: int = 2 << 30
    queue: int = 64
    kv_type: str = "f16"
    kv_rotate: str = "auto"
    share_prompts: bool = False
    keep: Keep | None = None
    lookup: bool = False
    exact: bool = False

    @property
    def drafts(self) -> str:
        """Returns the name of the drafting option, or an empty string."""
        return "--exact" if self.exact else "--lookup" if self.lookup else ""

    @property
    def storage(self) -> KvType:
        """Returns how keys and values are stored: kv_type and kv_rotate."""
        return KvType.parse(self.kv_type, self.kv_rotate)


@dataclass(frozen=True)
class Step:
    """Event: progress of a job. what: name of the current step. share: from 0 to 1."""

    what: str
    share: float


@dataclass(frozen=True)
class Text:
    """Event: more text of the answer. tokens: its tokens with logprobs, if requested.

    ids: all token ids since the last Text event.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Done:
    """Event: the answer is complete. report: how it ended, and its cost. patches: of decoding.kept_patches, or None."""

    report: Report
    patches: dict[str, Any] | None = None


@dataclass(frozen=True)
class Failed:
    """Event: the answer failed."""

    error: Exception


Event: TypeAlias = Step | Text | Done | Failed


@dataclass(frozen=True)
class Prompt:
    """A prompt without a conversation: texts, whose special tokens are read as special, and token ids.

    pictures: one for each marker in the text, which then is the only part. keep: for equal requests.
    """

    parts: tuple[str | int, ...]
    pictures: tuple[Picture, ...] = ()
    keep: bool = True


@dataclass(frozen=True)
class Request:
    """A request to the model: a conversation to be answered, or a prompt.

    values: variables for the chat template, for example the tools. patches: reports which patches of each picture are
    kept. edited: demotes pictures that were left out of a known conversation. count_only: counts the prompt's tokens,
    and reads nothing. read_only: reads the prompt for later requests, and answers nothing. dialect: parses the answer
    (serve/reading.py); its special tokens belong to the text. owner: of the request's key (guarding.Key); empty without
    a key. n_text: bytes of all texts.
    """

    messages: list[Message]
    plan: Plan
    sampling: Sampling
    values: Mapping[str, Any] = field(default_factory=dict)
    patches: bool = False
    edited: bool = False
    count_only: bool = False
    read_only: bool = False
    dialect: Dialect | None = None
    prompt: Prompt | None = None  # instead of messages
    owner: str = ""
    n_text: int = 0

    @property
    def pictures(self) -> list[Picture]:
        own = list(self.prompt.pictures) if self.prompt is not None else []
        return own or [picture for message in self.messages for picture in message.pictures]


class Job:
    """A submitted request. emit is called with each event, in threads of the scheduler; emit must not block."""

    def __init__(self, request: Request, emit: Callable[[Event], None]) -> None:
        self.request, self.emit = request, emit
        self.id = secrets.token_hex(8)
        self.cancelled = threading.Event()
        self.message_keys: list[Any] = []  # messages as of parked.message_keys; empty before preparing
        self.name = ""  # name of the prompt (parked.name_of), for equal requests; empty: the prompt is not shared
        self.demoted: list[int] = []  # numbers (from 0) of images that keep no rows from now on
        self.edited = False  # whether its rows contain pictures that the request left out
        self.report = Report(request.plan.method, request.plan.budget.value)
        self.asked_at = time.perf_counter()
        self.since = time.time()  # seconds since 1970
        self.first_token_s: float | None = None  # seconds from the request to the first token
        self.patches: dict[str, Any] | None = None  # of decoding.kept_patches
        self.ids: list[int] = []  # tokens of the answer
        self.stop_text = ""  # stop text that ended the answer
        self.over = False

    @property
    def begun(self) -> str:
        """Returns the given beginning of the answer, which the answer continues; or an empty string."""
        return self.message_keys[-1][1] if self.message_keys and self.message_keys[-1][0] == "assistant" else ""

    @property
    def picture_bytes(self) -> int:
        """Returns the bytes of pixels of the request's pictures, in memory or in a file."""
        return sum(picture.n_bytes for picture in self.request.pictures)

    def forget_messages(self) -> None:
        """Frees messages and pictures once the prompt is made."""
        prompt = self.request.prompt
        self.request = replace(self.request, messages=[], prompt=prompt and replace(prompt, parts=(), pictures=()))

    def end(self, event: Done | Failed) -> None:
        """Emits the last event. A second call does nothing."""
        if not self.over:
            self.over = True
            self.emit(event)
