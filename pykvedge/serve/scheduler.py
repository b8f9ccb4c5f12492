"""Schedules jobs: all conversations share one context, and decode in common batches."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from pykvedge.errors import CancelledError, KvedgeError, RequestError, StateError
from pykvedge.plans.making import plan as make_plan
from pykvedge.runtime.drafting import MOST, require_drafts
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.llama_context import N_UBATCH, ContextSize, ubatch_for
from pykvedge.runtime.loaded import LoadedModel
from pykvedge.serve.decoding import Decoder, Slot
from pykvedge.serve.job import Done, Event, Failed, Job, Limits, Request
from pykvedge.serve.parked import Park
from pykvedge.serve.preparing import Preparer, Work

_LAST_S = 60.0  # seconds for cancelled jobs to end
_MAX_PIXEL_BYTES = 512 << 20  # bytes of pixels in waiting requests; a single request may have more
_LOOK_S = 0.2  # seconds between two checks for cancelled jobs while nothing else happens


class Counts:
    """Sums over all ended jobs. Any thread may add."""

    def __init__(self) -> None:
        self.finished, self.sums = Counter[str](), Counter[str]()
        self._lock = threading.Lock()

    def ended(self, how: str, job: Job) -> None:
        """Adds an ended job. how: its kind of end."""
        tokens, kv = job.report.tokens, job.report.kv
        read = job.report.time.prefill_s > 0 or job.first_token_s is not None  # false: cancelled or failed before that
        kinds = ("prompt", "image", "pruned", "reused", "generated") if read else ()
        sums: dict[str, Any] = {f"{kind}_tokens": getattr(tokens, kind) for kind in kinds}
        sums |= {"compressions": kv.kept_of_them < kv.compressed_tokens, "kv_full_bytes": kv.full_bytes}
        sums["kv_kept_bytes"] = kv.kept_bytes
        if job.first_token_s is not None:
            sums |= {"first_tokens": 1, "first_token_s": job.first_token_s}
        with self._lock:
            self.finished[how] += 1
            self.sums.update(sums)


class Scheduler:
    """Runs the requests of a server. Any thread may submit requests. Close the scheduler when done."""

    def __init__(self, model: LoadedModel, limits: Limits, park: Park) -> None:
        """Raises OutOfMemoryError, ModelError, UnsupportedError, and the errors of making a context."""
        self.limits, self.park, self.counts = limits, park, Counts()
        self.loan = model.lend()  # the model, and caches shared with other sessions
        self.stopping = False  # whether new requests are refused
        with ExitStack() as undo:
            undo.callback(self.loan.give_back)
            if limits.drafts:
                require_drafts(self.loan.model, limits.drafts)
            self.preparer = Preparer(self.loan, park, limits)
            n_ubatch, outputs = ubatch_for(self.preparer.vision, N_UBATCH), MOST + 1 if limits.drafts else 0
            size = ContextSize(limits.slots * limits.n_ctx, n_ubatch, limits.storage, n_seq=limits.slots,
                               n_outputs=outputs)  # fmt: skip
            driver = Driver(self.loan.model, self.preparer.vision, size, self.loan.threads)
            undo.callback(driver.close)
            driver.take_over(make_plan("full"), keep=limits.keep, or_full=True)
            self._decoder = Decoder(driver, self.preparer, park, limits)
            undo.pop_all()
        # one lock with a condition per kind of thread, so that idle threads are not woken
        lock = threading.RLock()
        self._changed, self._to_shrink = threading.Condition(lock), threading.Condition(lock)
        self._to_prepare = {pictures: threading.Condition(lock) for pictures in (False, True)}
        self._asked: deque[Job] = deque()
        self._ready: deque[Work] = deque()
        self._slots: list[Slot] = []  # slots in use
        self._preparing: list[Job] = []
        self._over = False
        self._threads = [
            threading.Thread(target=run, name=f"kvedge-{what}", daemon=True)
            for what, run in (
                # encoding takes seconds: requests without pictures do not wait for it, and two requests with pictures
                # take turns
                ("prepare", lambda: self._prepare(pictures=False)),
                *[(f"encode-{i}", lambda: self._prepare(pictures=True)) for i in range(2)],
                ("decode", self._decode), ("park", self._shrink),
                ("vocabulary", self.preparer.warm),
            )
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request, emit: Callable[[Event], None]) -> Job:
        """Submits a request. emit is called with each event, in threads of the scheduler; emit must not block.

        Raises RequestError if the queue is full, StateError after close, and the errors of Preparer.at_once.
        """
        job = Job(request, emit)
        work = self.preparer.at_once(job)
        with self._changed:
            if self.stopping:
                raise StateError("the server is shutting down and accepts no more requests")
            pixels = sum(other.picture_bytes for other in self._asked)
            full = len(self._asked) + len(self._ready) >= self.limits.queue
            if full or (pixels and pixels + job.picture_bytes > _MAX_PIXEL_BYTES):
                self.counts.sums["requests_refused"] += 1
                if work is not None:
                    work.generation.close()
                raise RequestError(503, "too many requests are waiting; try again later", "queue_full", retry_s=2)
            if work is not None:
                self._ready.append(work)
                self._changed.notify_all()
            else:
                self._asked.append(job)
                self._to_prepare[bool(job.request.pictures)].notify()
        return job

    def cancel(self, job: Job) -> None:
        """Cancels a job. Its answer ends where it is."""
        job.cancelled.set()
        with self._changed:
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Returns the number of requests that no thread works on yet."""
        return len(self._asked) + len(self._ready)

    @property
    def busy(self) -> int:
        """Returns the number of requests in preparation or in a slot."""
        return len(self._slots) + len(self._preparing)

    def working(self) -> list[tuple[Job, str, Slot | None]]:
        """Returns the unfinished jobs, each with its state, and its slot or None."""
        with self._changed:
            out: list[tuple[Job, str, Slot | None]] = [(job, "waiting", None) for job in self._asked]
            out += [(job, "preparing", None) for job in self._preparing]
            out += [(work.job, "ready", None) for work in self._ready]
            out += [(slot.job, slot.state, slot) for slot in self._slots]
        return out

    def kv_bytes(self) -> int:
        """Returns the bytes of keys and values of the conversations in slots, without rows in files."""
        return sum(slot.n_bytes for slot in list(self._slots))

    def file_bytes(self) -> int:
        """Returns the bytes of these conversations' whole rows in files. The system may drop the pages from memory."""
        return sum(slot.file_bytes for slot in list(self._slots))

    def drain(self, patience: float = 0.0) -> None:
        """Refuses new requests, waits up to `patience` seconds for running jobs, and cancels the rest.

        A second call with less patience, from another thread, ends earlier.
        """
        with self._changed:
            self.stopping = True
            self._changed.wait_for(lambda: not (self.busy or self.waiting), timeout=patience)
            for job, _, _ in self.working():
                job.cancelled.set()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self.busy or self.waiting), timeout=_LAST_S)

    def close(self) -> None:
        """Cancels all jobs, and frees everything."""
        self.drain()
        with self._changed:
            self._over = True
            for condition in (self._changed, self._to_shrink, *self._to_prepare.values()):
                condition.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._decoder.close()
        self.park.shrink(0)
        self.loan.give_back()

    # --------------------------------------------------------------------------------------------------- preparing

    def _prepare(self, pictures: bool) -> None:
        """Prepares jobs with pictures, or jobs without pictures, in order."""

        def mine() -> Job | None:
            return next((job for job in self._asked if bool(job.request.pictures) == pictures), None)

        while True:
            with self._changed:
                self._to_prepare[pictures].wait_for(
                    lambda: self._over or (mine() and len(self._ready) < self.limits.slots)
                )
                job = mine()
                if job is None:
                    return  # the scheduler is closed
                self._asked.remove(job)
                self._preparing.append(job)
            work = None
            try:
                if job.cancelled.is_set():
                    raise CancelledError
                if job.request.count_only:
                    self.preparer.count(job)
                    job.end(Done(job.report))
                else:
                    work = self.preparer.prepare(job)
            except Exception as error:
                self._failed(job, error)
            with self._changed:
                self._preparing.remove(job)
                if work is not None:
                    self._ready.append(work)
                self._changed.notify_all()
                self._shrink_if_needed()

    def _failed(self, job: Job, error: Exception) -> None:
        self.counts.ended("cancelled" if isinstance(error, CancelledError) else "error", job)
        job.end(Failed(error))

    # --------------------------------------------------------------------------------------------------- decoding

    def _decode(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._ready or self._slots)
                if self._over and not (self._slots or self._ready or self._asked or self._preparing):
                    return
            self._admit()
            if self._slots:
                for slot, error in self._decoder.turn(self._slots):
                    self._leave(slot, error)
            else:
                with self._changed:
                    self._changed.wait(_LOOK_S)  # waits for memory, or for a prepared job

    def _leave(self, slot: Slot, error: Exception | None) -> None:
        with self._changed:
            self._slots.remove(slot)
            self._settled()
        if error is not None:
            self._failed(slot.job, error)
        else:
            self.counts.ended(slot.job.report.finish, slot.job)
            slot.job.end(Done(slot.job.report, slot.job.patches))

    def _admit(self) -> None:
        """Gives slots to prepared jobs, in order, while memory lasts."""
        while True:
            with self._changed:
                if not self._ready or len(self._slots) >= self.limits.slots:
                    return
                work = self._ready[0]
                needed = self._decoder.reserved(self._slots) + work.need
                if not work.job.cancelled.is_set() and needed + self.park.n_bytes > self.limits.memory:
                    self._shrink_if_needed()
                    return
                self._ready.popleft()
                for pictures in {bool(job.request.pictures) for job in self._asked}:
                    self._to_prepare[pictures].notify()
            slot, error = self._decoder.begin(work, self._slots)
            with self._changed:
                if slot is not None:
                    self._slots.append(slot)
                self._settled()
            if error is not None:
                self._failed(work.job, error)

    def _target(self) -> int:
        """Returns the bytes that the park may have in memory now. The caller holds the lock."""
        needed = self._decoder.reserved(self._slots) + (self._ready[0].need if self._ready else 0)
        return max(self.limits.memory - needed, 0)

    def _settled(self) -> None:
        """Wakes threads that wait for the end of all jobs, or for less memory. The caller holds the lock."""
        if self.stopping:
            self._changed.notify_all()
        self._shrink_if_needed()

    def _shrink_if_needed(self) -> None:
        """Wakes the thread that shrinks the park, if needed. The caller holds the lock."""
        if self._must_shrink():
            self._to_shrink.notify()

    def _must_shrink(self) -> bool:
        return self.park.n_bytes > self._target() or self.park.leaving > 0

    def _shrink(self) -> None:
        while True:
            with self._to_shrink:
                self._to_shrink.wait_for(lambda: self._over or self._must_shrink())
                if self._over:
                    return
                target = self._target()
            with suppress(KvedgeError):  # the folder's notes report this error
                self.park.move_leaving()
                self.park.shrink(target)
            with self._changed:
                self._changed.notify_all()
