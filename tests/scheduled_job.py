"""A job of a server's scheduler that runs in the tests' process, with the events of the job."""

import threading

from pykvedge.serve.job import Done, Failed, Text


class ScheduledJob:
    """Submits a request and collects its job's events. cancel_at(event): whether to cancel the job at this event."""

    def __init__(self, scheduler, request, cancel_at=lambda event: False):
        self.events, self._over, self._cancel_at = [], threading.Event(), cancel_at
        self._submitted = threading.Event()
        self.job = scheduler.submit(request, self._take)
        self._submitted.set()

    def _take(self, event):
        self.events.append(event)
        if self._cancel_at(event):
            assert self._submitted.wait(60)
            self.job.cancelled.set()
        if isinstance(event, (Done, Failed)):
            self._over.set()

    def wait(self):
        """Waits for the last event (Done or Failed), and returns it."""
        assert self._over.wait(120)
        return self.events[-1]

    @property
    def report(self):
        """Returns the report of the answer. Fails when the job failed."""
        assert isinstance(self.wait(), Done), self.events[-1].error
        return self.events[-1].report

    @property
    def text(self):
        return self.report.text

    @property
    def pieces(self):
        """Returns the pieces of the answer's text."""
        return [event.text for event in self.events if isinstance(event, Text)]
