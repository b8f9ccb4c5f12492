"""What a server has done so far, for /metrics."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from pykvedge.serve.job import Job


@dataclass
class Counts:
    """Sums over all jobs that have ended. Any thread may add."""

    finished: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    prompt_tokens: int = 0
    image_tokens: int = 0
    pruned_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    compressions: int = 0
    kv_full_bytes: int = 0  # of all compressed prompts, had nothing been dropped
    kv_kept_bytes: int = 0
    first_token_s: float = 0.0
    first_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ended(self, how: str, job: Job) -> None:
        """Adds a job that has ended in this way."""
        report = job.report
        with self._lock:
            self.finished[how] += 1
            self.prompt_tokens += report.tokens.prompt
            self.image_tokens += report.tokens.image
            self.pruned_tokens += report.tokens.pruned
            self.reused_tokens += report.tokens.reused
            self.generated_tokens += report.tokens.generated
            self.compressions += bool(report.kv.compressed_tokens)
            self.kv_full_bytes += report.kv.full_bytes
            self.kv_kept_bytes += report.kv.kept_bytes
            if job.first_token_s is not None:
                self.first_token_s += job.first_token_s
                self.first_tokens += 1
