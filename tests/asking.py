"""Jobs of a server's scheduler in the tests' process, and what is told of them."""

import threading

from pykvedge.serve.job import Done, Failed, Text


class Asked:
    """A job, and its events. cancel_at: tells the event at which it is given up."""

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
        """Waits for the end, and returns its event."""
        assert self._over.wait(120)
        return self.events[-1]

    @property
    def report(self):
        """What is said of the answer. Fails where there is none."""
        assert isinstance(self.wait(), Done), self.events[-1].error
        return self.events[-1].report

    @property
    def text(self):
        return self.report.text

    @property
    def pieces(self):
        """The texts that came, one by one."""
        return [event.text for event in self.events if isinstance(event, Text)]
