"""A Slot is a sequence of the shared context, and the job that has it: its prompt is read, then its answer written."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from pykvedge.errors import StateError
from pykvedge.models.vision import ImagePiece, Piece, TextPiece
from pykvedge.runtime.generation import Generation
from pykvedge.runtime.replay import Part
from pykvedge.runtime.snapshot import Snapshot
from pykvedge.serve.again import SecondPass
from pykvedge.serve.job import Job, Text


@dataclass
class Prepared:
    """A job whose prompt is cut and whose images are encoded. parked: the conversation that it goes on from.

    read: the same prompt, read for somebody else; name: of the prompt, for whoever asks the same; empty: for nobody.
    need: bytes of keys and values that it takes at most; room: tokens that the answer may have within them.
    replays: whether its plan goes by a second pass over prompts; again: that over this one.
    """

    job: Job
    pieces: list[Piece]
    generation: Generation
    parked: Snapshot | None
    read: Snapshot | None = None
    name: str = ""
    need: int = 0
    room: int = 0
    replays: bool = False
    again: list[Part] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(piece.n_tokens for piece in self.pieces)


@dataclass
class Slot:
    """One of the sequences, while a job has it."""

    sequence: int
    work: Prepared
    steps: deque[Piece]  # of the prompt, not read yet
    n_past: int = 0
    n_cells: int = 0
    compressed_tokens: int = 0  # since they were measured
    n_bytes: int = 0  # of keys and values, when they were last counted
    begun: bool = False  # its prompt has been looked for, and what it goes on from is there
    next: int | None = None  # the token that is decoded next; None: the prompt is being read
    second: SecondPass | None = None  # over the prompt, while that is read
    answered: list[int] = field(default_factory=list)  # tokens of the answer that were decoded
    began: float = field(default_factory=time.perf_counter)
    answering_since: float = 0.0
    told: int = 0  # tokens whose text was passed on

    def stand(self, at: Snapshot) -> None:
        """Goes on behind what was read before."""
        self.n_past, self.n_cells, self.compressed_tokens = at.n_past, at.n_cells, at.compressed_tokens

    @property
    def job(self) -> Job:
        return self.work.job

    def text_step(self, most: int) -> list[int]:
        """Takes up to so many tokens of the text that comes next off the prompt."""
        piece = self.steps.popleft()
        if isinstance(piece, ImagePiece):
            raise StateError("an image is read by itself")
        if len(piece.tokens) > most:
            self.steps.appendleft(TextPiece(piece.tokens[most:]))
        return piece.tokens[:most]

    def moved(self, n_tokens: int, n_past: int | None = None) -> None:
        """Notes that so many tokens were decoded. n_past: the position after them, where it is not as far."""
        self.n_cells += n_tokens
        self.n_past = self.n_past + n_tokens if n_past is None else n_past

    @property
    def state(self) -> str:
        """What is done with the job."""
        if self.next is not None:
            return "answering"
        return "reading" if self.second is None else "reading again"

    @property
    def share(self) -> float:
        """How much of the prompt was read."""
        if self.second is not None:
            return self.second.share(list(self.steps))
        left = sum(piece.n_tokens for piece in self.steps)
        return 1 - left / max(self.work.n_tokens, 1)

    def tell(self, text: str) -> None:
        """Passes text of the answer on, and what is known of its tokens."""
        ids, noted = self.work.generation.tokens, self.job.report.logprobs
        noted = noted[self.told :] if noted else []
        if text or noted:
            self.job.emit(Text(text, tuple(noted), tuple(ids[self.told :])))
            self.told = len(ids)

    def finish(self, how: str) -> None:
        """Completes the answer and its report; the caller tells of it when the slot is free."""
        report, generation = self.job.report, self.work.generation
        self.tell(generation.end(how, broken_off=how == "cancelled"))
        self.job.ids, self.job.stop_text = generation.tokens, generation.stop_text
        report.time.decode_steps = max(report.tokens.generated - 1, 0)
        if self.answering_since:
            report.time.decode_s = time.perf_counter() - self.answering_since
