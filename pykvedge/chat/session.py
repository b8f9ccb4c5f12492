"""A conversation with a model. A plan compresses the KV cache after every prompt."""

from __future__ import annotations

import functools
import itertools
import numbers
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from pykvedge.chat.conversation import Answer, Conversation
from pykvedge.errors import (
    CancelledError,
    KvedgeError,
    NothingToCompressError,
    OutOfMemoryError,
    StateError,
    UnsupportedError,
    UsageError,
)
from pykvedge.library import libkvedge
from pykvedge.models import profiles, tuned
from pykvedge.models.composer import Composer
from pykvedge.models.documents import MAX_PAGES, MAX_STREAMED, PageSize, load_pictures
from pykvedge.models.images import Picture, notes
from pykvedge.models.model import Progress, silent
from pykvedge.models.modelfile import facts
from pykvedge.models.packaged import PACKAGED, hints
from pykvedge.models.prompt import Message, check_places, places
from pykvedge.models.vision import Piece, Vision
from pykvedge.plans.making import checked_plan
from pykvedge.plans.plan import Plan
from pykvedge.runtime.engine import Engine, Mark
from pykvedge.runtime.generation import Generation
from pykvedge.runtime.loaded import LoadedModel, Loan, borrow, path_of, with_encoder
from pykvedge.runtime.report import Drafts, ModelFacts, Report, Time
from pykvedge.runtime.sampling import Sampling, checked_sampling
from pykvedge.runtime.sessionfile import Note, check_payload, encoded, fingerprint, read_note
from pykvedge.runtime.settings import Settings
from pykvedge.system import dropped, signals
from pykvedge.system.guard import Closing, one_thread, undoing

if TYPE_CHECKING:
    import asyncio
    from typing import Any

    from typing_extensions import Unpack

    from pykvedge.models.images import ImageSources
    from pykvedge.runtime.settings import GivenSettings


P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class UndoState:
    """State of a conversation before its last message. mark: None if the cache was empty, or was not copied."""

    n_messages: int
    pending: list[int]
    plan: Plan
    report: Report | None
    mark: Mark | None = None
    why_not: str = ""  # why undo is impossible, or empty


class Session(Closing, Conversation):
    """A conversation with a model. Close the session when done, or use a with statement.

        with pykvedge.Session() as session:  # the packaged model
            print(session.ask("What is the code?", "scene.png").read())

    One thread at a time may use a session: a call during another thread's call raises StateError. `close` stops the
    other thread's call, which raises CancelledError, and waits for it; the answer of that thread raises StateError.
    """

    instead = "use fork() to make a second session with the same conversation"
    _asking: asyncio.Task[Any] | None = None  # the task that reads an answer of aask

    @signals.held()
    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel | Loan = PACKAGED,
        mmproj: str | os.PathLike[str] | None = None,
        plan: Plan | None = None,
        *,
        progress: Progress = silent,
        cancel: threading.Event | None = None,
        **settings: Unpack[GivenSettings],
    ) -> None:
        """Loads the model, with an image encoder if `mmproj` is given; or borrows a model of pykvedge.load.

        By default the model is the packaged model, which knows drawn scenes (examples/scene-1.png).

        plan: what to keep of each prompt; by default `kvedge tune`'s choice for the model (a note of the first report
        says so), or default_plan(). settings: fields of Settings. progress(what, share done) is called during long
        steps. Setting `cancel` stops the current step or answer. Raises ModelError, LibraryError, ProfileError,
        UsageError, CancelledError, and StateError for a closed model.
        """
        mmproj = with_encoder(model, mmproj)
        chosen = Settings.of({**settings})
        named = plan is not None or chosen.stream or chosen.profile is not None
        plan, self._tuned = (checked_plan(plan), "") if named else tuned.plan_or_default(path_of(model))
        super().__init__(plan, chosen, progress, cancel)
        self._before: UndoState | None = None  # before the last message
        self._taken_back: Message | None = None  # message of a failed retry, for the next retry
        self._dropped_whole = False  # whether a loaded file's whole rows are not used
        self._hinted = False  # whether a note said that the packaged model does not know a picture
        self.check_plan(self.plan)
        profiles.find(self.plan, path_of(model), self.settings.profile)  # raises before the weights are read
        started = time.perf_counter()
        self._loan: Loan | None = borrow(model, mmproj, self.settings, self._progress, self.stop)
        self.model, self._openings = self._loan.model, self._loan.caches.openings
        self._dropped: dropped.Reference | None = None
        with undoing(self.close):
            self._vision = Vision(self._loan.encoder, self._loan.caches.images) if self._loan.encoder else None
            self._composer = Composer(self.model, self._vision)
            self.check_drafts(self.plan)
            self._facts = ModelFacts(*facts(self.model.header))
        threads, loan = self.settings.threads, self._loan
        chooser = None if threads else loan.thread_chooser
        self._engine = Engine(self.model, self._vision, self.settings, threads or loan.threads, chooser)
        self._dropped = dropped.add(self, functools.partial(_free, self._engine, self._vision, self._loan))
        self._load_s = time.perf_counter() - started

    def __repr__(self) -> str:
        name, said = self.model.path.name, sum(message.role == "user" for message in self.messages)
        state = "closed" if self._loan is None else f"{said} {'question' if said == 1 else 'questions'}"
        return f"<Session of {name}, {self.plan.method} {self.plan.budget}, {state}>"

    @one_thread
    def ask(self, prompt: str, images: ImageSources = (), sampling: Sampling | None = None) -> Answer:
        """Reads the next message, and returns its answer; iterate over the answer for pieces of text.

        Each `<image>` in the prompt marks the place of a picture, in order; without marks, pictures come before the
        text. This call does all work before the first generated token. images: one or several, in any form of
        load_picture, and PDFs: report.pdf, or pages of it, report.pdf[3-7]. "Page 4:" is put before the fourth page. A
        stream (Settings.stream) requests pictures one at a time, also from a generator, and forgets their pixels.
        Raises ImageError, ContextError, OutOfMemoryError, NothingToCompressError, UsageError, or CancelledError.
        """
        _ = self.engine  # raises after close
        self._end_answer()
        if not isinstance(prompt, str):
            raise UsageError(f"the prompt must be text, not {prompt!r:.40}")
        most = MAX_STREAMED if self.settings.stream else MAX_PAGES
        loaded = load_pictures(images, self.page_size, most, self.stop)
        pictures = list(itertools.islice(loaded, places(prompt) + 1 if self.settings.stream else None))
        self._frames = itertools.chain(pictures, loaded)
        self._require_eyes(pictures)
        _check_prompt(prompt, len(pictures))
        sampling = checked_sampling(sampling)
        report = Report(self.plan.method, self.plan.budget.value, time=Time(load_s=self._load_s), model=self._facts)
        report.drafts = Drafts() if self.settings.drafts else None
        generation = Generation(self.model, sampling, report)
        self._before, before = None, self._now()
        if not self.messages and self.settings.system:
            self.messages.append(Message("system", self.settings.system))
        self.messages.append(Message("user", prompt, pictures))
        try:
            self.read(report)
            if signals.pending():
                raise CancelledError
        except BaseException:
            generation.close()
            self.messages.pop()
            if before.mark is not None:
                with suppress(KvedgeError):
                    self._return_to(before)
            elif self.touched:  # the cache is unusable: the next message reads the conversation's text again
                self.forget()
            raise
        self._load_s, self._before, self._taken_back = 0.0, before, None
        if self._dropped_whole:
            report.notes.append(
                "the uncompressed KV rows in the session file were dropped, because this session "
                "does not keep rows (keep, --keep)"
            )
            self._dropped_whole = False
        report.notes += [self._tuned] if self._tuned else []
        self._tuned = ""
        report.notes += notes(pictures)
        if not self._hinted:
            seeing = any(message.pictures for message in self.messages)
            hinted = hints(self.model.path, pictures, seeing)
            report.notes += hinted
            self._hinted = bool(hinted)
        report.notes += [*(self._loan.caches.notes() if self._loan is not None else []), *self.engine.notes()]
        self.answer = answer = Answer(self, report, generation)
        return answer

    async def aask(
        self, prompt: str, images: ImageSources = (), sampling: Sampling | None = None
    ) -> AsyncGenerator[str, None]:
        """Asks as `ask` does, from an event loop. The work runs in threads and never blocks the loop.

            async for piece in session.aask("What is the code?", "scene.png"):
                print(piece, end="")

        The report is `last_report` afterwards. The answer ends when the task is cancelled or the iteration is left; its
        text stays in the conversation. A prompt that is cancelled during its reading leaves the conversation unchanged.
        Another task that asks before the answer ends gets StateError.
        """
        import asyncio  # the import takes 40 ms

        task, other = asyncio.current_task(), self._asking
        if self.answer is not None and other is not None and other is not task and not other.done():
            raise StateError(
                "another task is using this session; wait until that task ends, or give each task its own session"
            )
        self._asking = task
        answer = await self._apart(self.ask, prompt, images, sampling)
        try:
            while (piece := await self._apart(next, answer, None)) is not None:
                yield piece
        finally:
            answer.close()
            if self._asking is task:
                self._asking = None

    async def _apart(self, call: Callable[P, R], *given: P.args, **named: P.kwargs) -> R:
        """Runs a call in a thread. If the task is cancelled, stops the call and waits for it."""
        import asyncio

        work = asyncio.ensure_future(asyncio.to_thread(call, *given, **named))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self.stop.set()
            while not work.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([work])
            work.exception()  # the cancelled task raises instead
            self.stop.clear()
            if self.answer is not None:
                self.answer.close()
            raise

    @one_thread
    def undo(self) -> Message:
        """Removes the last message and its answer, and returns the message.

        Restores the conversation, and the cache exactly. From the second message on this needs Settings.undo. Raises
        StateError if nothing can be removed: only one message can, and no message of a loaded file.
        """
        _ = self.engine  # raises after close
        self._end_answer()
        before = self._before
        if self.settings.stream:
            raise StateError("a message of a stream cannot be undone, because a stream drops KV pairs for good")
        if before is None or before.n_messages >= len(self.messages):
            raise StateError(
                "there is no message to undo: only the last message of this session can be undone, and only once"
            )
        if before.why_not:
            raise StateError(f"the last message cannot be undone: {before.why_not}")
        message = next(m for m in self.messages[before.n_messages :] if m.role == "user")
        self._return_to(before)
        self._before = None
        return message

    def _now(self) -> UndoState:
        """Returns the present state. Copies the cache if it holds tokens and the settings ask for a copy."""
        now = UndoState(len(self.messages), self.pending, self.plan, self.last_report)
        if not self.in_cache:
            return now
        if not self.settings.undo:
            return replace(now, why_not="the session was made without undo=True")
        try:
            return replace(now, mark=self.engine.mark())
        except (OutOfMemoryError, UnsupportedError) as error:
            return replace(now, why_not=str(error))

    def _return_to(self, before: UndoState) -> None:
        """Restores an earlier state, except the plan. Raises KvedgeError."""
        del self.messages[before.n_messages :]
        self._begins = {i: at for i, at in self._begins.items() if i < before.n_messages}
        self.last_report = before.report
        if before.mark is None:
            self.forget()
            return
        try:
            self.engine.return_to(before.mark)
            if self.plan != before.plan:
                self.engine.set_plan(self.plan)
        except KvedgeError:
            self.forget()
            raise
        self.in_cache, self.pending = True, before.pending

    @one_thread
    def retry(self, sampling: Sampling | None = None) -> Answer:
        """Removes the last message and asks it again, under the current plan. Raises the errors of undo and ask.

        After an error of ask the message is not in the conversation; the next retry asks it again.
        """
        _ = self.engine  # raises after close
        Generation(self.model, checked_sampling(sampling), Report("", 0)).close()  # raises early
        message = self._taken_back = self._taken_back or self.undo()
        return self.ask(message.text, message.pictures, sampling)

    @property
    def undo_bytes(self) -> int:
        """Returns the bytes of keys and values in the copy for undo, or 0 without a copy."""
        return self._before.mark.n_bytes if self._before and self._before.mark else 0

    @one_thread
    def examine(
        self,
        prompt: str,
        images: ImageSources,
        plan: Plan,
        look: Callable[[libkvedge.Cache, list[Piece]], None] = lambda cache, pieces: None,
    ) -> list[list[list[int]]]:
        """Reads a prompt as the first of a conversation, compresses it by `plan`, and forgets it.

        look(cache, pieces) is called before the compression. Returns the indices of the kept tokens per stored layer
        and KV head. Raises the errors of ask, and NothingToCompressError if llama.cpp keeps the cache.
        """
        plan = checked_plan(plan)
        self.clear()
        pieces = self.first_prompt(prompt, images, plan)
        try:
            self.engine.make_room(pieces, plan)
            self.engine.encode(pieces, self._progress, self.stop)
            self.engine.prefill(pieces, self._progress, self.stop)
            cache = self.engine.cache
            if cache is None:
                raise NothingToCompressError(f"kvedge does not hold the KV cache of {self.model.path.name}")
            look(cache, pieces)
            self.engine.compress()
            return [[cache.tokens(i, h) for h in range(len(heads))] for i, heads in enumerate(cache.lengths())]
        finally:
            self.release(pieces)
            self.forget()

    @one_thread
    def set_plan(self, plan: Plan) -> None:
        """Sets the plan of later prompts. Raises NothingToCompressError, UsageError, UnsupportedError, ProfileError."""
        plan = checked_plan(plan)
        self.check_plan(plan)
        self.check_drafts(plan)
        self._end_answer()
        self.engine.set_plan(plan)
        self.plan, self._tuned = plan, ""

    @one_thread
    def demote(self, image: int, budget: float | int) -> None:
        """Limits what image number `image` (from 1 on) keeps: a share of its tokens, or a number of KV pairs per head.

        Takes effect at once, and reads nothing. Needs Settings.keep. Raises UsageError, BudgetError, StateError,
        UnsupportedError for a model that cuts images into parts.
        """
        self._limit_image(image, budget)

    @one_thread
    def promote(self, image: int) -> None:
        """Removes the limit of an image: its rows return from the whole rows. Raises the errors of demote."""
        self._limit_image(image, None)

    @one_thread
    def forget_image(self, image: int) -> None:
        """Makes an image keep no rows until it is promoted. Raises the errors of demote."""
        self._limit_image(image, 0)

    def _limit_image(self, image: int, budget: float | int | None) -> None:
        self._end_answer()
        if not self.in_cache:
            raise StateError("the session has no conversation yet; ask a question first")
        ages, n = self.engine.ages, sum(len(message.pictures) for message in self.messages)
        if len(ages) != n:
            name = self.model.path.name
            raise UnsupportedError(
                f"images cannot be demoted or promoted: {name} reads {n} images in {len(ages)} parts"
            )
        ages.limit(image, budget)

    @one_thread
    def drop_turn(self, turn: int) -> Message:
        """Removes a message, from the 2nd to the last but one, with its answer, and returns it. Reads nothing again.

        Later rows keep their values, and their positions move up. The first message begins the conversation, so it
        stays; `undo` removes the last message. Needs Settings.keep. Raises UsageError, StateError (the turn was read
        together with others), UnsupportedError (keys of this model or method cannot be rotated).
        """
        self._end_answer()
        asked = [i for i, message in enumerate(self.messages) if message.role == "user"]
        if not isinstance(turn, numbers.Integral) or isinstance(turn, bool) or not 2 <= turn < len(asked):
            n = len(asked)
            raise UsageError(
                f"turn {turn!r:.20} cannot be dropped: the conversation has {n} turns, and its first "
                f"and last turn must stay"
            )
        first, last = asked[turn - 1], asked[turn]
        begin, end = self._begins.get(first), self._begins.get(last)
        if not self.in_cache or begin is None or end is None:
            raise StateError(f"turn {turn} cannot be dropped, because its tokens were read together with other turns")
        self.engine.check_cut()
        with undoing(self.forget):
            self.engine.cut_out(begin, end)
        moved, gone = end.position - begin.position, last - first
        self._begins = {
            (i if i < first else i - gone): (at if i < first else at._replace(position=at.position - moved))
            for i, at in self._begins.items() if not first <= i < last
        }  # fmt: skip
        message = self.messages[first]
        del self.messages[first:last]
        self._before = None
        return message

    @one_thread
    def clear(self) -> None:
        """Starts a new conversation."""
        self._end_answer()
        self.forget()
        if self._vision is not None:
            self._vision.forget()
        self.messages.clear()
        self._taken_back = None
        self._pixel_file = None  # closes the file of pixels
        self.last_report = None

    @one_thread
    def save(self, path: str | os.PathLike[str], whole: bool = False) -> int:
        """Writes the conversation and its compressed cache to a file. An older file is replaced only on success.

        whole: also writes whole rows, if the session keeps them (Settings.keep); after loading, later messages are read
        over them. Ends an answer that is still generated. Returns the bytes of the file. Raises SessionFileError,
        StateError (nothing was asked yet), UnsupportedError, UsageError (whole rows are not kept).
        """
        encoded(path)  # raises for an invalid path
        if whole and self.settings.keeping is None:
            raise UsageError("whole=True needs the uncompressed KV rows: create the session with keep='ram' or 'disk'")
        self._end_answer()
        if not self.in_cache or not self.messages:
            raise StateError("the session has no conversation to save yet; ask a question first")
        self.engine.save(path, fingerprint(self.model.header), self._note(whole))
        return Path(os.fsdecode(path)).stat().st_size

    @one_thread
    def load(self, path: str | os.PathLike[str], plan: Plan | None = None) -> None:
        """Continues the conversation of a file that `save` wrote, in place of the present conversation.

        plan: for later prompts; None: the file's plan. Pixels of earlier pictures are not restored. A damaged file
        leaves the present conversation unchanged. Raises SessionFileError, ContextError, OutOfMemoryError, UsageError.
        """
        plan = None if plan is None else checked_plan(plan)
        self._end_answer()
        model = fingerprint(self.model.header)
        note = read_note(path, model)
        if note.kv_type != self.settings.kv_type:
            name, kind = os.fsdecode(path), note.kv_type
            raise UsageError(f"{name} stores keys and values as {kind}; use --kv-type {kind}")
        plan = note.plan if plan is None else plan
        self.check_plan(plan)
        self.check_drafts(plan)
        self.engine.check_holds(note, os.fsdecode(path))
        if self.in_cache:
            check_payload(path)  # raises before the present conversation is lost
        self.forget()
        started = time.perf_counter()
        self.engine.load(path, model, note, plan)
        self._load_s += time.perf_counter() - started
        self.plan, self.messages, self.pending, self.in_cache = plan, note.messages, note.pending, True
        self._tuned, self._taken_back = "", None
        self.last_report, self._dropped_whole = None, note.whole and self.settings.keeping is None

    @one_thread
    def fork(self, plan: Plan | None = None, cancel: threading.Event | None = None) -> Session:
        """Returns another conversation in the same state, at the cost of its compressed rows.

        Both continue independently, each with its own cache; they share the model. plan: for later prompts; None: the
        present plan. Ends an answer that is still generated. Raises StateError (nothing was asked yet),
        UnsupportedError, OutOfMemoryError, UsageError.
        """
        self._end_answer()
        if not self.in_cache or not self.messages or self._loan is None:
            raise StateError("the session has no conversation to fork yet; ask a question first")
        model = fingerprint(self.model.header)
        at, note = self.engine.sequence.snapshot(model), self._note()
        settings: GivenSettings = {f.name: getattr(self.settings, f.name) for f in fields(self.settings)}  # type: ignore
        plan = self.plan if plan is None else plan
        other = Session(self._loan, None, plan, progress=self._progress, cancel=cancel, **settings)
        with undoing(other.close):
            other.engine.fork(at, model, note, other.plan)
        other.messages, other.pending, other.in_cache = list(self.messages), list(self.pending), True
        return other

    def _note(self, whole: bool = False) -> Note:
        sequence = self.engine.sequence
        if whole and self.engine.cache is not None and self.engine.cache.replays:
            raise UnsupportedError(
                f"uncompressed KV rows cannot be saved with method '{self.plan.method}', which reads the "
                f"conversation twice; save with whole=False"
            )
        if whole := whole and sequence.saves_whole_rows:
            sequence.take_back()
        context, unread, images = self.engine.context, list(sequence.unread), list(sequence.images)
        place = context.n_ctx, context.n_ubatch, sequence.n_past, sequence.n_cells, sequence.measured_pairs
        said = self.pending, self.messages, unread, images, sequence.passage.tokens()
        return Note(self.plan, self.settings.kv_type, *place, *said, whole)

    def close(self) -> None:
        """Frees everything except a model from pykvedge.load. Waits for a thread in a call of this session.

        A second call does nothing.
        """
        with self.guard.closing():
            if self.answer is not None:
                self.answer.drop()
                self.answer = None
            if self._loan is not None:
                self.release_all()
                _free(self._engine, self._vision, self._loan)
                self._engine = self._vision = self._loan = None
                dropped.remove(self._dropped)

    def forget(self) -> None:
        """Drops the cache. The next message reads the whole conversation again."""
        super().forget()
        self._before = None

    @property
    def sees_images(self) -> bool:
        """Returns whether an image encoder is loaded."""
        return self._vision is not None

    @property
    def page_size(self) -> PageSize:
        """Returns the size at which pages of documents are drawn: the size that the image encoder sees."""
        encoder = self._vision.encoder if self._vision is not None else None
        return PageSize.of(encoder.header, encoder.limits) if encoder is not None else PageSize()

    @one_thread
    def first_prompt(self, prompt: str, pictures: ImageSources = (), plan: Plan | None = None) -> list[Piece]:
        """Cuts a message into pieces as the first of a conversation, for `engine`. Release the pieces after use.

        plan: prunes the images; None: the session's plan.
        """
        _ = self.engine  # raises after close
        message = Message("user", prompt, list(load_pictures(pictures, self.page_size, stop=self.stop)))
        self._require_eyes(message.pictures)
        _check_prompt(prompt, len(message.pictures))
        return self.first_pieces([message], plan or self.plan)

    def _require_eyes(self, pictures: list[Picture]) -> None:
        if pictures and self._vision is None:
            raise UsageError(
                f"{self.model.path.name} was loaded without an image encoder, so it cannot read images; give the "
                f"model's mmproj file with --mmproj"
            )

    def _end_answer(self) -> None:
        if self.answer is not None:
            self.answer.give_way()


def _check_prompt(prompt: str, n_pictures: int) -> None:
    """Raises UsageError for places without a picture, and for an empty prompt without pictures."""
    check_places(prompt, n_pictures)
    if not prompt.strip() and not n_pictures:
        raise UsageError("the prompt is empty; give a question")


def _free(engine: Engine | None, vision: Vision | None, loan: Loan) -> None:
    if engine is not None:
        engine.close()
    if vision is not None:
        vision.forget()
    loan.give_back()
