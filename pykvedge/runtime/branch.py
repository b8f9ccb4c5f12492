"""Branches: a conversation is taken back to where it stood before its last message, to the bit.

Before a message a second sequence becomes a copy of what the cache holds: compressed rows, what the decode policy
remembers, and llama.cpp's own cells and states. Taking the message back makes that copy the conversation again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pykvedge.errors import KvedgeError, OutOfMemoryError, StateError, UnsupportedError
from pykvedge.models.prompt import Message
from pykvedge.native import memory
from pykvedge.plans.plan import Plan

if TYPE_CHECKING:
    from pykvedge.chat.session import Session
    from pykvedge.runtime.libkvedge import Cache
    from pykvedge.runtime.llama_context import Context
    from pykvedge.runtime.report import Report

COPY = 1  # number of the sequence that holds it


@dataclass(frozen=True)
class Mark:
    """What an engine needs beside the copy of its sequence."""

    n_past: int
    n_cells: int
    plan: Plan | None  # that the cache followed
    held: float  # pairs per head after the last compression
    n_bytes: int  # of the copied rows


@dataclass(frozen=True)
class Branch:
    """A conversation before its last message. mark: None where the cache held nothing of it, or could not be copied."""

    n_messages: int
    pending: list[int]
    plan: Plan
    report: Report | None
    mark: Mark | None = None
    why_not: str = ""  # it cannot be gone back to


def copy(context: Context, cache: Cache | None) -> int:
    """Makes the second sequence a copy of the first, and returns the bytes of its rows, not counting llama.cpp's.

    Raises OutOfMemoryError, UnsupportedError.
    """
    context.drop(COPY)
    _require_window(context)
    n_bytes = cache.stats().bytes if cache is not None else 0
    memory.require(n_bytes, "a copy of the conversation", "close other programs")
    context.copy_to(COPY)
    if cache is not None:
        cache.check()
    return n_bytes


def bring_back(context: Context, cache: Cache | None, mark: Mark) -> int:
    """Makes the first sequence what the second one is, and empties that. Returns how often it was compressed."""
    context.move_from(COPY)
    context.n_past, context.n_cells = mark.n_past, mark.n_cells
    if cache is None:
        return 0
    cache.check()
    return cache.stats().n_compressions


def _require_window(context: Context) -> None:
    """A windowed layer of llama.cpp reuses cells that its window has left, but not those that a copy shares.

    It has as many as two windows and one pass through the model take, in steps of 256, and no more than the context.
    """
    window = context.llama.llama_model_n_swa(context.model.handle)
    cells = -(-min(context.n_ctx, 2 * window + context.n_ubatch) // 256) * 256
    if window > 0 and cells < context.n_ctx and context.n_cells + window + context.n_ubatch > cells:
        raise UnsupportedError(
            f"llama.cpp keeps layers of this model that see {window} tokens, and the conversation has become too long "
            "for a copy of them"
        )


def before_message(session: Session) -> Branch:
    """Where the conversation stands. Copies the cache if there is something in it and the settings ask for it."""
    branch = Branch(len(session.messages), session.pending, session.plan, session.last_report)
    if not session.in_cache:
        return branch
    if not session.settings.undo:
        return replace(branch, why_not="the session was made without undo=True")
    try:
        return replace(branch, mark=session.engine.mark())
    except (OutOfMemoryError, UnsupportedError) as error:
        return replace(branch, why_not=str(error))


def restore(session: Session, branch: Branch) -> None:
    """Makes the conversation what it was. The plan of the session stays. Raises KvedgeError."""
    engine = session.engine
    del session.messages[branch.n_messages :]
    session.last_report = branch.report
    if branch.mark is None:
        session.forget()
        return
    try:
        engine.return_to(branch.mark)
        if session.plan != branch.plan:
            engine.set_plan(session.plan)
    except KvedgeError:
        session.forget()
        raise
    session.in_cache, session.pending = True, branch.pending


def recover(session: Session, branch: Branch) -> None:
    """After a message that failed: the cache of before, or none where there is no copy of it."""
    if branch.mark is None:
        session.forget()
        return
    try:
        restore(session, branch)
    except KvedgeError:
        session.forget()


def undo(session: Session, branch: Branch | None) -> Message:
    """Takes the last message and its answer back, and returns the message. Raises StateError."""
    if session.settings.stream:
        raise StateError("a stream forgets what it has read, so nothing of it can be taken back")
    if branch is None or branch.n_messages >= len(session.messages):
        raise StateError("there is no message to take back: one can be, and none was sent since")
    if branch.why_not:
        raise StateError(f"the last message cannot be taken back: {branch.why_not}")
    message = next(m for m in session.messages[branch.n_messages :] if m.role == "user")
    restore(session, branch)
    return message
