"""A Slot is a sequence of the shared context, and the job that has it: its prompt is read, then its answer written."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pykvedge.models.vision import Piece
from pykvedge.runtime.generation import Generation
from pykvedge.runtime.replay import Part
from pykvedge.runtime.sequence import Ahead, Passes, Sequence
from pykvedge.runtime.snapshot import Snapshot
from pykvedge.serve.job import Job, Text


@dataclass
class Prepared:
    """A job whose prompt is cut and whose images are encoded.

    before: the conversation that it goes on from, or, with logits, the same prompt, read for somebody else. name: of
    the prompt, for whoever asks the same; empty: for nobody. need: bytes of keys and values that it takes at most;
    room: tokens that the answer may have within them. replays: whether its plan goes by a second pass over prompts;
    again: that over this one.
    """

    job: Job
    pieces: list[Piece]
    generation: Generation
    before: Snapshot | None
    name: str = ""
    need: int = 0
    room: int = 0
    replays: bool = False
    again: list[Part] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(piece.n_tokens for piece in self.pieces)


@dataclass(eq=False)
class Slot:
    """One of the sequences, while a job has it. passes: over the prompt; None: nobody looked what it goes on from."""

    sequence: Sequence
    work: Prepared
    passes: Passes | None = None
    ahead: Ahead | None = None  # what the next pass reads of the prompt
    second: bool = False  # whether the prompt is read a second time
    next: int | None = None  # the token that is decoded next; None: the prompt is being read
    n_bytes: int = 0  # of keys and values, when they were last counted
    began: float = field(default_factory=time.perf_counter)
    answering_since: float = 0.0
    told: int = 0  # tokens whose text was passed on

    @property
    def job(self) -> Job:
        return self.work.job

    @property
    def state(self) -> str:
        """What is done with the job."""
        if self.next is not None:
            return "answering"
        return "reading again" if self.second else "reading"

    @property
    def share(self) -> float:
        """How much of the prompt was read."""
        return self.sequence.share if self.next is None else 1.0

    def read(self) -> Passes:
        """Reads the prompt, and once more where the plan asks for that (Sequence.steps)."""
        spent = self.job.report.time
        yield from self.sequence.steps(self.work.pieces)
        spent.prefill_s = time.perf_counter() - self.began
        if self.work.again:
            self.second = True
            yield from self.sequence.again(self.work.again)
            spent.replay_s = self.sequence.replay_s

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
