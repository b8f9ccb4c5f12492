"""A conversation is taken back to where it stood before its last message, to the bit.

Before a message the engine marks what it has read. Taking the message back goes to that mark.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pykvedge.chat.conversation import Conversation
from pykvedge.errors import KvedgeError, OutOfMemoryError, StateError, UnsupportedError
from pykvedge.models.prompt import Message
from pykvedge.plans.plan import Plan
from pykvedge.runtime.engine import Mark
from pykvedge.runtime.report import Report


@dataclass(frozen=True)
class Branch:
    """What a conversation was before its last message. mark: None where the cache held nothing, or was not copied."""

    n_messages: int
    pending: list[int]
    plan: Plan
    report: Report | None
    mark: Mark | None = None
    why_not: str = ""  # it cannot be gone back to


def before_message(conversation: Conversation) -> Branch:
    """Notes where the conversation stands. Copies the cache if it holds something and the settings ask for it."""
    branch = Branch(len(conversation.messages), conversation.pending, conversation.plan, conversation.last_report)
    if not conversation.in_cache:
        return branch
    if not conversation.settings.undo:
        return replace(branch, why_not="the session was made without undo=True")
    try:
        return replace(branch, mark=conversation.engine.mark())
    except (OutOfMemoryError, UnsupportedError) as error:
        return replace(branch, why_not=str(error))


def restore(conversation: Conversation, branch: Branch) -> None:
    """Makes the conversation what it was, but for its plan, which stays. Raises KvedgeError."""
    engine = conversation.engine
    del conversation.messages[branch.n_messages :]
    conversation.last_report = branch.report
    if branch.mark is None:
        conversation.forget()
        return
    try:
        engine.return_to(branch.mark)
        if conversation.plan != branch.plan:
            engine.set_plan(conversation.plan)
    except KvedgeError:
        conversation.forget()
        raise
    conversation.in_cache, conversation.pending = True, branch.pending


def recover(conversation: Conversation, branch: Branch) -> None:
    """Goes back to the cache of before a message that failed, or to none where there is no copy of it."""
    if branch.mark is None:
        conversation.forget()
        return
    try:
        restore(conversation, branch)
    except KvedgeError:
        conversation.forget()


def undo(conversation: Conversation, branch: Branch | None) -> Message:
    """Takes the last message and its answer back, and returns the message. Raises StateError."""
    if conversation.settings.stream:
        raise StateError("a stream forgets what it has read, so nothing of it can be taken back")
    if branch is None or branch.n_messages >= len(conversation.messages):
        raise StateError("there is no message to take back: one can be, and none was sent since")
    if branch.why_not:
        raise StateError(f"the last message cannot be taken back: {branch.why_not}")
    message = next(m for m in conversation.messages[branch.n_messages :] if m.role == "user")
    restore(conversation, branch)
    return message
