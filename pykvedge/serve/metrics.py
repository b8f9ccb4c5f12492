"""/metrics: what a server does and has done, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from pykvedge.serve.engine import Engine
from pykvedge.system import memory


def text(engine: Engine) -> bytes:
    """Writes all figures."""
    registry = CollectorRegistry()
    registry.register(_Figures(engine))
    return generate_latest(registry)


class _Figures:
    """Those of an engine, whenever they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Lists them under their names, of which a counter's gets _total."""
        engine, counts = self._engine, self._engine.counts
        answers = CounterMetricFamily("kvedge_answers", "Answers, by how they ended.", labels=["finish"])
        for how in ("end", "stop", "length", "context", "cancelled", "error"):
            answers.add_metric([how], counts.finished[how])
        yield answers
        gauges = {
            "requests_waiting": ("Requests that nobody works on yet.", engine.waiting),
            "requests_running": ("Requests that are worked on.", engine.busy),
            "kv_bytes": ("Keys and values of conversations that are being answered.", engine.kv_bytes()),
            "kv_parked_bytes": ("Keys and values of conversations that wait, in memory.", engine.park.n_bytes),
            "kv_limit_bytes": ("What both may be together.", engine.limits.memory),
            "conversations_parked": ("Conversations that wait, in memory.", len(engine.park)),
            "private_bytes": ("Resident memory of the process that is not shared with files.", memory.own_bytes()),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(f"kvedge_{name}", what, value)
        counters = {
            "requests_refused": ("Requests refused because too many waited.", counts.refused),
            "prompt_tokens": ("Tokens of prompts that were read.", counts.prompt_tokens),
            "image_tokens": ("Those of them that came from images.", counts.image_tokens),
            "pruned_tokens": ("Tokens of images that were not read.", counts.pruned_tokens),
            "reused_tokens": ("Tokens that a parked conversation had read.", counts.reused_tokens),
            "generated_tokens": ("Tokens of answers.", counts.generated_tokens),
            "compressions": ("Prompts that were compressed.", counts.compressions),
            "kv_full_bytes": ("Keys and values of prompts, had all been kept.", counts.kv_full_bytes),
            "kv_kept_bytes": ("Keys and values of prompts that were kept.", counts.kv_kept_bytes),
        }
        for name, (what, value) in counters.items():
            yield CounterMetricFamily(f"kvedge_{name}", what, value)
        yield SummaryMetricFamily("kvedge_first_token_seconds", "Seconds from requests to their first tokens.",
                                  counts.first_tokens, counts.first_token_s)  # fmt: skip
