"""A Job is one answer that somebody waits for, within the Limits of a server; it is told event by event."""

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

READING = "reading the prompt"  # a step's name


@dataclass(frozen=True)
class Limits:
    """Bounds of a server. n_ctx: tokens of one conversation. queue: requests that wait.

    memory: bytes of keys and values of all conversations. share_prompts: a prompt that was read for one owner of a key
    is there for the others. keep: where whole rows stay behind compressed ones; None: nowhere. lookup: an answer that
    is written alone is drafted by what its conversation said before. exact: answers are drafted with the compressed
    rows and verified over the whole ones.
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
        """Names the option by which answers are drafted, if there is one."""
        return "--exact" if self.exact else "--lookup" if self.lookup else ""

    @property
    def storage(self) -> KvType:
        """How keys and values are stored: kv_type and kv_rotate."""
        return KvType.parse(self.kv_type, self.kv_rotate)


@dataclass(frozen=True)
class Step:
    """The job has come so far: what is done now, and its share from 0 to 1."""

    what: str
    share: float


@dataclass(frozen=True)
class Text:
    """The answer goes on with this text. tokens: those of it that are certain, where logprobs were asked for.

    ids: of the tokens since the last text.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Done:
    """The answer is complete; the job's report says how it ended and what it cost. patches: of kept_patches."""

    report: Report
    patches: dict[str, Any] | None = None


@dataclass(frozen=True)
class Failed:
    """There is no answer, or no more of it."""

    error: Exception


Event: TypeAlias = Step | Text | Done | Failed


@dataclass(frozen=True)
class Prompt:
    """A prompt that is no conversation: texts, in which special tokens are read as such, and numbers of tokens.

    pictures: one for each marker in the text, which is then the only part. keep: for whoever asks the same again.
    """

    parts: tuple[str | int, ...]
    pictures: tuple[Picture, ...] = ()
    keep: bool = True


@dataclass(frozen=True)
class Request:
    """What a model is asked: a conversation that ends where it is to answer, or a prompt.

    values: variables for the chat template, as the tools that there are. patches: whether the report is to tell what
    is left of each picture. edited: whether pictures that were left out of a known conversation are to be demoted.
    count_only: the report is to have the tokens of the prompt, and nothing is read. read_only:
    the prompt is read, for whoever asks the same later, and nothing is answered. dialect: what the answer is read by
    (serve/reading.py), whose marks belong to its text. owner: of the key that it came with (guarding.Key); empty where
    none is needed. n_text: bytes of its texts.
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
    """A request on its way. emit is called with each event, in threads of the scheduler; it must not wait."""

    def __init__(self, request: Request, emit: Callable[[Event], None]) -> None:
        self.request, self.emit = request, emit
        self.id = secrets.token_hex(8)
        self.cancelled = threading.Event()
        self.said: list[Any] = []  # what was said (parked.said_in), once that was looked at
        self.name = ""  # of the prompt (parked.name_of), for whoever asks the same; empty: for nobody
        self.demoted: list[int] = []  # images of the conversation, from 0 on, that keep nothing from now on
        self.edited = False  # whether its rows are of more pictures than were sent
        self.report = Report(request.plan.method, request.plan.budget.value)
        self.asked_at = time.perf_counter()
        self.since = time.time()  # seconds since 1970
        self.first_token_s: float | None = None  # since it was asked
        self.patches: dict[str, Any] | None = None  # (decoding.kept_patches)
        self.ids: list[int] = []  # tokens of the answer
        self.stop_text = ""  # that the answer ended before
        self.over = False

    @property
    def begun(self) -> str:
        """The text of the answer that was given, and that it goes on with; empty where it begins anew."""
        return self.said[-1][1] if self.said and self.said[-1][0] == "assistant" else ""

    @property
    def picture_bytes(self) -> int:
        """So many bytes of pixels wait to be looked at, in memory or aside."""
        return sum(picture.n_bytes for picture in self.request.pictures)

    def forget_messages(self) -> None:
        """Frees the pictures: the prompt was made of them."""
        prompt = self.request.prompt
        self.request = replace(self.request, messages=[], prompt=prompt and replace(prompt, parts=(), pictures=()))

    def end(self, event: Done | Failed) -> None:
        """Tells how it ended. Does nothing the second time."""
        if not self.over:
            self.over = True
            self.emit(event)
