"""The Scheduler answers jobs side by side: all conversations lie in one context, and are decoded in common batches."""

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

_LAST_S = 60.0  # for what was given up to come to its end
_MOST_PIXEL_BYTES = 512 << 20  # of pictures that wait, unless it is one request alone
_LOOK_S = 0.2  # between two looks at jobs that were given up while nothing else happens


class Counts:
    """Sums over all jobs that have ended. Any thread may add."""

    def __init__(self) -> None:
        self.finished, self.sums = Counter[str](), Counter[str]()
        self._lock = threading.Lock()

    def ended(self, how: str, job: Job) -> None:
        """Adds a job that has ended in this way."""
        tokens, kv = job.report.tokens, job.report.kv
        read = job.report.time.prefill_s > 0 or job.first_token_s is not None  # and not given up before
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
    """Give it requests from any thread. Close it when done."""

    def __init__(self, model: LoadedModel, limits: Limits, park: Park) -> None:
        """Raises OutOfMemoryError, ModelError, and what making a context raises."""
        self.limits, self.park, self.counts = limits, park, Counts()
        self.loan = model.lend()  # the model, and what is shared with other sessions
        self.stopping = False  # it takes no more requests
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
        # one lock, and a condition for each thread: whoever has nothing to do is not woken
        lock = threading.RLock()
        self._changed, self._to_shrink = threading.Condition(lock), threading.Condition(lock)
        self._to_prepare = {pictures: threading.Condition(lock) for pictures in (False, True)}
        self._asked: deque[Job] = deque()
        self._ready: deque[Work] = deque()
        self._slots: list[Slot] = []  # that have a job
        self._preparing: list[Job] = []
        self._over = False
        self._threads = [
            threading.Thread(target=run, name=f"kvedge-{what}", daemon=True)
            for what, run in (
                # pictures are encoded for seconds: questions without any do not wait, two requests with some take turns
                ("prepare", lambda: self._prepare(pictures=False)),
                *[(f"encode-{i}", lambda: self._prepare(pictures=True)) for i in range(2)],
                ("decode", self._decode), ("park", self._shrink),
                ("vocabulary", self.preparer.warm),
            )
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request, emit: Callable[[Event], None]) -> Job:
        """Takes a request. emit is called with each event, in threads of the scheduler; it must not wait.

        Raises RequestError where too many wait, StateError after close, and what preparing raises that takes no time.
        """
        job = Job(request, emit)
        work = self.preparer.at_once(job)
        with self._changed:
            if self.stopping:
                raise StateError("the server is going down; it takes no more requests")
            pixels = sum(other.picture_bytes for other in self._asked)
            full = len(self._asked) + len(self._ready) >= self.limits.queue
            if full or (pixels and pixels + job.picture_bytes > _MOST_PIXEL_BYTES):
                self.counts.sums["requests_refused"] += 1
                if work is not None:
                    work.generation.close()
                raise RequestError(503, "too many requests are waiting already", "queue_full", retry_s=2)
            if work is not None:
                self._ready.append(work)
                self._changed.notify_all()
            else:
                self._asked.append(job)
                self._to_prepare[bool(job.request.pictures)].notify()
        return job

    def cancel(self, job: Job) -> None:
        """Gives a job up. Its answer ends where it is."""
        job.cancelled.set()
        with self._changed:
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Counts the requests that nobody works on yet."""
        return len(self._asked) + len(self._ready)

    @property
    def busy(self) -> int:
        """Counts the requests that are worked on."""
        return len(self._slots) + len(self._preparing)

    def working(self) -> list[tuple[Job, str, Slot | None]]:
        """Lists the jobs that are not over, what is done with each, and its slot if it has one."""
        with self._changed:
            out: list[tuple[Job, str, Slot | None]] = [(job, "waiting", None) for job in self._asked]
            out += [(job, "preparing", None) for job in self._preparing]
            out += [(work.job, "ready", None) for work in self._ready]
            out += [(slot.job, slot.state, slot) for slot in self._slots]
        return out

    def kv_bytes(self) -> int:
        """Counts the bytes of keys and values of the conversations that are being answered."""
        return sum(slot.n_bytes for slot in list(self._slots))

    def file_bytes(self) -> int:
        """Counts the bytes of their whole rows that lie in a file, whose pages the system may drop from memory."""
        return sum(slot.file_bytes for slot in list(self._slots))

    def drain(self, patience: float = 0.0) -> None:
        """Takes no more requests, lets those that are there end for so many seconds, and gives up the rest.

        Called again meanwhile with less patience it ends sooner.
        """
        with self._changed:
            self.stopping = True
            self._changed.wait_for(lambda: not (self.busy or self.waiting), timeout=patience)
            for job, _, _ in self.working():
                job.cancelled.set()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self.busy or self.waiting), timeout=_LAST_S)

    def close(self) -> None:
        """Gives up what is there, and frees all."""
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
        """Prepares jobs with pictures, or those without, in their order."""

        def mine() -> Job | None:
            return next((job for job in self._asked if bool(job.request.pictures) == pictures), None)

        while True:
            with self._changed:
                self._to_prepare[pictures].wait_for(
                    lambda: self._over or (mine() and len(self._ready) < self.limits.slots)
                )
                job = mine()
                if job is None:
                    return  # over
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
                    self._changed.wait(_LOOK_S)  # for memory, or for a job to be prepared

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
        """Gives slots to prepared jobs, in their order, as long as there is memory for them."""
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
        """The park may have so many bytes in memory now. Call it with the lock held."""
        needed = self._decoder.reserved(self._slots) + (self._ready[0].need if self._ready else 0)
        return max(self.limits.memory - needed, 0)

    def _settled(self) -> None:
        """Wakes who waits for the end of all jobs, or for less memory. Call it with the lock held."""
        if self.stopping:
            self._changed.notify_all()
        self._shrink_if_needed()

    def _shrink_if_needed(self) -> None:
        """Wakes the thread that shrinks the park. Call it with the lock held."""
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
            with suppress(KvedgeError):  # a folder that cannot be used says so in its notes
                self.park.move_leaving()
                self.park.shrink(target)
            with self._changed:
                self._changed.notify_all()
