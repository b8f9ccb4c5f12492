"""/metrics: what a server does and has done, as Prometheus reads it."""

from __future__ import annotations

from pykvedge.chat.serve.engine import Engine
from pykvedge.native import memory

_PREFIX = "kvedge_"


def text(engine: Engine) -> str:
    """Writes all figures."""
    counts = engine.counts
    lines: list[str] = []

    def add(name: str, kind: str, what: str, value: float, label: str = "") -> None:
        if not any(line.startswith(f"# HELP {_PREFIX}{name} ") for line in lines):
            lines.extend([f"# HELP {_PREFIX}{name} {what}", f"# TYPE {_PREFIX}{name} {kind}"])
        lines.append(f"{_PREFIX}{name}{label} {value:g}" if value < 1e6 else f"{_PREFIX}{name}{label} {round(value)}")

    add("requests_waiting", "gauge", "Requests that nobody works on yet.", engine.waiting)
    add("requests_running", "gauge", "Requests that are worked on.", engine.busy)
    add("requests_refused_total", "counter", "Requests refused because too many waited.", counts.refused)
    for how in ("end", "stop", "length", "context", "cancelled", "error"):
        add("answers_total", "counter", "Answers, by how they ended.", counts.finished[how], f'{{finish="{how}"}}')
    add("kv_bytes", "gauge", "Keys and values of conversations that are being answered.", engine.kv_bytes())
    add("kv_parked_bytes", "gauge", "Keys and values of conversations that wait, in memory.", engine.park.n_bytes)
    add("kv_limit_bytes", "gauge", "What both may be together.", engine.limits.memory)
    add("conversations_parked", "gauge", "Conversations that wait, in memory.", len(engine.park))
    add("private_bytes", "gauge", "Resident memory of the process that is not shared with files.", memory.own_bytes())
    add("prompt_tokens_total", "counter", "Tokens of prompts that were read.", counts.prompt_tokens)
    add("image_tokens_total", "counter", "Those of them that came from images.", counts.image_tokens)
    add("pruned_tokens_total", "counter", "Tokens of images that were not read.", counts.pruned_tokens)
    add("reused_tokens_total", "counter", "Tokens that a parked conversation had read.", counts.reused_tokens)
    add("generated_tokens_total", "counter", "Tokens of answers.", counts.generated_tokens)
    add("compressions_total", "counter", "Prompts that were compressed.", counts.compressions)
    add("kv_full_bytes_total", "counter", "Keys and values of prompts, had all been kept.", counts.kv_full_bytes)
    add("kv_kept_bytes_total", "counter", "Keys and values of prompts that were kept.", counts.kv_kept_bytes)
    add("first_token_seconds_sum", "counter", "Seconds from requests to their first tokens.", counts.first_token_s)
    add("first_token_seconds_count", "counter", "Requests that got a first token.", counts.first_tokens)
    return "\n".join(lines) + "\n"
