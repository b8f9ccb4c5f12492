"""Turns repetitions into figures: medians over rounds, quartiles, and ratios to stock in the same round."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvedge_lab.bench.machine import Bandwidth, OtherPrograms
from kvedge_lab.bench.matrix import STOCK, Variant
from kvedge_lab.bench.measure import Repetition
from kvedge_lab.bench.runner import Group, Outcome
from pykvedge.cli.tables import folded, wrapped
from pykvedge.system.memory import readable
from pykvedge.system.shown import counted

Spread = tuple[float, float]
SPARE = 0.1  # share of the processors that an idle system takes at times


@dataclass
class Row:
    """The figures of a variant on a prompt. Figures are medians; *_spread: first and third quartile.

    first_token_s: encoding of the images, pruning, prefill and compression. image_again_s: the same sum for images that
    are already encoded. again_s: a second conversation about the same images; None: not measured.
    prefill_tok_s: tokens that the model read. *_vs_stock: medians of the ratios of each round.
    limit_tok_s: read bandwidth over the bytes that a token reads, weights and kept KV. *_j_token: joules per token.
    later_s: a later message; None: not measured. keep: where whole rows stay behind kept rows.
    kv_whole_bytes: whole rows after the answer; kv_whole_file_bytes: the part of these bytes in a file.
    device_prompt_bytes, device_bytes: keys and values on devices, before the compression and after the answer.
    device_compressed: whether rows on devices were compressed there; None: no rows on devices. device_problem: why not.
    device_fetched_bytes, device_sent_bytes: bytes over the bus in that compression; device_fetched_row: fetched bytes
    per pending row and KV head. device_operations: operations of graphs. device_*_ms: its steps.
    device_peak_bytes: largest memory use of devices, above the use before the context; device_peak_vs_cache: this peak
    minus stock's use beside its cache, over stock's cache. Both are None if devices do not report memory.
    rss_*: growth of the process by the context. others: share of the processors that other programs had; None: the
    rounds were too short to tell. disturbed: `others` exceeds the share that this program's threads leave.
    """

    model: str
    prompt: str
    tokens: int
    image_tokens: int
    variant: str
    method: str
    budget: float | int | None
    kv_type: str
    rounds: int
    prefill_tok_s: float
    prefill_spread: Spread
    prefill_vs_stock: float | None
    compress_ms: float
    encode_s: float
    prune_ms: float
    first_token_s: float
    first_token_vs_stock: float | None
    image_again_s: float
    again_s: float | None
    decode_tok_s: float
    decode_spread: Spread
    decode_vs_stock: float | None
    limit_tok_s: float
    kv_full_bytes: int
    kv_kept_bytes: int
    kv_peak_bytes: int
    device_prompt_bytes: int
    device_bytes: int
    rss_peak_bytes: int
    rss_after_bytes: int
    prefill_j_token: float | None = None
    decode_j_token: float | None = None
    keep: str = ""
    kv_whole_bytes: int = 0
    kv_whole_file_bytes: int = 0
    later_s: float | None = None
    later_vs_stock: float | None = None
    device_compressed: bool | None = None
    device_problem: str = ""
    device_fetched_bytes: int = 0
    device_sent_bytes: int = 0
    device_fetched_row: float | None = None
    device_operations: int = 0
    device_measure_ms: float = 0.0
    device_choose_ms: float = 0.0
    device_gather_ms: float = 0.0
    device_merge_ms: float = 0.0
    device_upload_ms: float = 0.0
    device_peak_bytes: int | None = None
    device_peak_vs_cache: float | None = None
    others: float | None = None
    disturbed: bool = False


def rows(outcome: Outcome) -> list[Row]:
    """Returns rows in the order of measurement: per model and prompt, with stock first."""
    assert outcome.bandwidth is not None
    out = []
    for group in outcome.groups:
        stock = next((found for variant, found in group.rounds.items() if variant.plan is None), [])
        for variant, found in group.rounds.items():
            row = _row(group, variant, found, stock, outcome.bandwidth)
            _on_devices(row, found)
            _disturbance(row, found, outcome.machine)
            out.append(row)
        here = out[len(out) - len(group.rounds) :]
        _device_peaks(here, group)
        if any(row.disturbed for row in here if row.method == STOCK):  # every ratio is to stock
            for row in here:
                row.disturbed = True
    return out


STEPS = ("measure", "choose", "gather", "merge", "upload")  # steps of a compression on devices


def _on_devices(row: Row, found: list[Repetition]) -> None:
    """Adds the figures of a compression on devices, if rows were there."""
    work = [r.device for r in found if r.device is not None]
    if not work:
        return
    last = work[-1]
    row.device_compressed, row.device_problem = last.compressed, last.problem
    row.device_fetched_bytes, row.device_sent_bytes = last.fetched_bytes, last.sent_bytes
    row.device_fetched_row = last.fetched_bytes / found[-1].device_rows if found[-1].device_rows else None
    row.device_operations = last.operations
    for step in STEPS:
        setattr(row, f"device_{step}_ms", 1000 * _median(getattr(w, f"{step}_s") for w in work))


def _device_peaks(rows: list[Row], group: Group) -> None:
    for row, variant in zip(rows, group.rounds, strict=True):
        row.device_peak_bytes = group.device_peaks.get(variant)
    stock = next((row for row in rows if row.method == STOCK), None)
    if stock is None or stock.device_peak_bytes is None:
        return
    beside = stock.device_peak_bytes - stock.kv_full_bytes
    for row in rows:
        if row.device_peak_bytes is not None:
            row.device_peak_vs_cache = (row.device_peak_bytes - beside) / stock.kv_full_bytes


def _disturbance(row: Row, found: list[Repetition], about: dict[str, Any]) -> None:
    """Sets `others` and `disturbed`. Others may use the processors that our threads leave, and a tenth more."""
    wall, cores = sum(r.wall_s for r in found), about.get("cores", 1)
    if wall >= OtherPrograms.SPAN_S:
        row.others = min(sum(r.others_s for r in found) / wall / cores, 1.0)
        row.disturbed = row.others > (cores - min(about.get("threads", cores), cores)) / cores + SPARE


def by_prompt(made: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Groups rows by model and prompt, in their order."""
    out: dict[tuple[str, str], list[Row]] = {}
    for row in made:
        out.setdefault((row.model, row.prompt), []).append(row)
    return out


def warnings(made: list[Row]) -> list[str]:
    """Returns a line for each prompt whose figures other programs disturbed."""
    out = []
    for (model, prompt), mine in by_prompt(made).items():
        shares = [row.others or 0.0 for row in mine if row.disturbed]
        if shares:
            out.append(
                f"{model}, {prompt}: other programs used up to {100 * max(shares):.0f} % of the processors during "
                f"the measurement, so figures marked ? are unreliable; end the other programs, or pass a smaller "
                f"--threads, and repeat"
            )
    return out


def _row(group: Group, variant: Variant, found: list[Repetition], stock: list[Repetition], bandwidth: Bandwidth) -> Row:
    prefill, waits = [r.tokens / r.prefill_s for r in found], _median(map(_wait, found))
    last, shared = found[-1], list(zip(found, stock, strict=False))
    is_stock = variant.plan is None
    encode_s = group.stock_encode_s if is_stock else group.encode_s
    # stock reads the content of its cache, not the allocated size
    kv_read = group.kv_bytes_per_token * group.n_tokens if is_stock else last.kept_bytes
    per_token = group.weight_bytes + kv_read
    return Row(
        model=group.model,
        prompt=group.shape.name,
        tokens=last.tokens,
        image_tokens=group.n_image_tokens - (group.n_tokens - last.tokens),
        variant=variant.label,
        method=variant.name,
        budget=variant.plan.budget.value if variant.plan else None,
        kv_type=variant.kv_type,
        rounds=len(found),
        prefill_tok_s=_median(prefill),
        prefill_spread=_quartiles(prefill),
        prefill_vs_stock=_known(b.prefill_s / (a.prefill_s + a.compress_s) for a, b in shared),
        compress_ms=1000 * _median(r.compress_s for r in found),
        encode_s=encode_s,
        prune_ms=1000 * _median(r.prune_s for r in found),
        first_token_s=encode_s + waits,
        first_token_vs_stock=_known((group.stock_encode_s + _wait(b)) / (encode_s + _wait(a)) for a, b in shared),
        image_again_s=waits,
        again_s=_known(r.again_s for r in found if r.again_s is not None),
        decode_tok_s=1 / _median(_median(r.decode_s) for r in found),
        decode_spread=_quartiles([1 / s for r in found for s in r.decode_s]),
        decode_vs_stock=_known(_median(b.decode_s) / _median(a.decode_s) for a, b in shared),
        limit_tok_s=bandwidth.bytes_per_second(per_token) / per_token,
        kv_full_bytes=last.full_bytes,
        kv_kept_bytes=last.kept_bytes,
        kv_peak_bytes=max(r.peak_bytes for r in found),
        device_prompt_bytes=last.device_prompt_bytes,
        device_bytes=last.device_bytes,
        rss_peak_bytes=round(_median(r.rss_peak_bytes for r in found)),
        rss_after_bytes=round(_median(r.rss_after_bytes for r in found)),
        prefill_j_token=_known(r.prefill_j / r.tokens for r in found if r.prefill_j is not None and r.tokens),
        decode_j_token=_known(r.decode_j / len(r.decode_s) for r in found if r.decode_j is not None and r.decode_s),
        keep=variant.keep.place if variant.keep else "",
        kv_whole_bytes=last.whole_bytes,
        kv_whole_file_bytes=last.whole_file_bytes,
        later_s=_known(r.later_s for r in found if r.later_s is not None),
        later_vs_stock=_known(b.later_s / a.later_s for a, b in shared if a.later_s and b.later_s),
    )


def _wait(r: Repetition) -> float:
    """Returns the seconds from an encoded image to the first token."""
    return r.prune_s + r.prefill_s + r.compress_s


def _quartiles(values: Sequence[float]) -> Spread:
    low, high = np.quantile(values, [0.25, 0.75])
    return float(low), float(high)


def _median(values: Iterable[float]) -> float:
    return float(np.median([*values]))


def _known(values: Iterable[float]) -> float | None:
    """Returns the median; None if nothing was measured."""
    known = [*values]
    return _median(known) if known else None


NOTES = (
    "stock: llama.cpp's attention and cache with default settings, in kvedge's library without kvedge attached (the "
    "logits equal those of an unpatched build bit for bit). `full` keeps all KV pairs in kvedge's cache.",
    "Medians; in brackets, the middle half of all tokens. / stock: median of the ratios of each round, compression "
    "counted as prefill. first token: encoding the images, prefill, compression. limit: the most tokens/s that the "
    "memory speed allows for the weights and the kept KV. RSS: growth of the process from the start of the context.",
)
DEVICES = (
    "compressed: the place of the compression. fetched, sent: bytes that crossed the bus for the compression; a row: "
    "fetched bytes per pending row of a KV head. operations: number of operations in device graphs. measure, gather "
    "and merge run on the device, choose runs on the host; upload: sends the host's results. peak: peak device memory "
    "without the weights (`--device-peak`); / cache: this peak, less stock's memory without its cache, over that cache."
)
WAITS = (
    "first token: encoding, pruning, prefill and compression together, and the speedup over stock, which encodes with "
    "the weights in the file's format. image again: the same with a cached output of the encoder. talk again: a second "
    "conversation about the same images starts from the compressed cache of the first one, and reads only its question "
    "(`--again`)."
)


def as_json(made: list[Row], outcome: Outcome) -> str:
    """Returns one object with the machine, the rows, and what was left out."""
    about = {"machine": outcome.machine, "left_out": outcome.left_out, "interrupted": outcome.interrupted}
    return json.dumps({**about, "rows": [asdict(row) for row in made]}, indent=1)


def as_jsonl(made: list[Row]) -> str:
    """Returns one object per line."""
    return "\n".join(json.dumps(asdict(row)) for row in made)


def as_markdown(made: list[Row], outcome: Outcome) -> str:
    """Returns a table per model and prompt, each with a title line, and the meaning of the columns."""
    parts = []
    energy = any(row.decode_j_token is not None for row in made)
    columns = COLUMNS | (WHOLE_COLUMNS if any(row.keep for row in made) else {})
    columns |= LATER_COLUMNS if any(row.later_s is not None for row in made) else {}
    columns |= {"J/token": lambda r: f"{r.decode_j_token or 0:.2f}"} if energy else {}
    for (model, prompt), mine in by_prompt(made).items():
        images = f", {mine[0].image_tokens} of images" if mine[0].image_tokens else ""
        title = f"**{model}**: a prompt of {counted(mine[0].tokens, 'token')} ({prompt}{images}), "
        title += counted(mine[0].rounds, 'round')
        parts += [wrapped(title), _table(columns, mine)]
        if any(row.device_compressed is not None or row.device_peak_bytes is not None for row in mine):
            parts.append(_table(DEVICE_COLUMNS, mine))
            there = [row for row in mine if row.device_problem]
            parts += [wrapped(f"{row.variant} was compressed on the host: {row.device_problem}.") for row in there]
        if mine[0].image_tokens:
            parts.append(_table(WAIT_COLUMNS, mine))
    about = outcome.machine
    told = "" if energy else " The energy used is not available on this system."
    n = about.get("threads", 0)
    parts.append(f"{about.get('cpu', '')}, {counted(n, 'thread')}.{told}")
    disturbed = [f"Disturbed: {text}." for text in warnings(made)]
    notes = [*NOTES, *([DEVICES] if any(row.device_compressed is not None for row in made) else [])]
    notes += [WAITS] if any(row.image_tokens for row in made) else []
    stopped = ["Stopped before the end."] if outcome.interrupted else []
    return "\n\n".join([*parts, *map(wrapped, [*disturbed, *notes, *stopped])])


def _named(row: Row) -> str:
    return row.variant + (" ?" if row.disturbed else "")


def _on_device(row: Row, cell: str) -> str:
    return cell if row.device_compressed is not None else ""


# heading -> text of a cell
Columns = dict[str, Callable[[Row], str]]
WAIT_COLUMNS: Columns = {
    "variant": _named,
    "tokens": lambda r: str(r.tokens),
    "of images": lambda r: str(r.image_tokens),
    "encode": lambda r: f"{r.encode_s:.2f} s",
    "prune": lambda r: f"{r.prune_ms:.1f} ms",
    "prefill": lambda r: f"{r.image_again_s - (r.prune_ms + r.compress_ms) / 1000:.2f} s",
    "first token / stock": lambda r: _times(r.first_token_vs_stock),
    "image again": lambda r: f"{r.image_again_s:.2f} s",
    "talk again": lambda r: f"{r.again_s:.2f} s" if r.again_s is not None else "",
}
DEVICE_COLUMNS: Columns = {
    "variant": lambda r: r.variant,
    "compressed": lambda r: _on_device(r, "there" if r.device_compressed else "on the host"),
    "fetched": lambda r: _on_device(r, readable(r.device_fetched_bytes)),
    "a row": lambda r: _on_device(r, f"{r.device_fetched_row:.1f} B" if r.device_fetched_row is not None else ""),
    "sent": lambda r: _on_device(r, readable(r.device_sent_bytes)),
    "operations": lambda r: str(r.device_operations) if r.device_compressed else "",
    **{step: lambda r, step=step: f"{getattr(r, f'device_{step}_ms'):.2f} ms" if r.device_compressed else ""
       for step in STEPS},
    "peak": lambda r: readable(r.device_peak_bytes) if r.device_peak_bytes is not None else "",
    "peak / cache": lambda r: _times(r.device_peak_vs_cache),
}  # fmt: skip
COLUMNS: Columns = {
    "variant": _named,
    "prefill tok/s": lambda r: _speed(r.prefill_tok_s),
    "prefill / stock": lambda r: _times(r.prefill_vs_stock),
    "compress": lambda r: f"{r.compress_ms:.1f} ms",
    "first token": lambda r: f"{r.first_token_s:.2f} s",
    "decode tok/s": lambda r: f"{_speed(r.decode_tok_s)} ({'-'.join(map(_speed, r.decode_spread))})",
    "decode / stock": lambda r: _times(r.decode_vs_stock),
    "limit": lambda r: _speed(r.limit_tok_s),
    "KV full": lambda r: readable(r.kv_full_bytes),
    "KV kept": lambda r: readable(r.kv_kept_bytes),
    "KV peak": lambda r: readable(r.kv_peak_bytes),
    "RSS peak": lambda r: readable(r.rss_peak_bytes),
    "RSS after": lambda r: readable(r.rss_after_bytes),
}
WHOLE_COLUMNS: Columns = {
    "whole rows": lambda r: readable(r.kv_whole_bytes) if r.keep else "",
    "in a file": lambda r: readable(r.kv_whole_file_bytes) if r.keep else "",
}
LATER_COLUMNS: Columns = {
    "later message": lambda r: f"{r.later_s or 0:.3f} s", "later / stock": lambda r: _times(r.later_vs_stock)
}  # fmt: skip


def _table(columns: Columns, rows: list[Row]) -> str:
    return folded([[*columns], *([cell(row) for cell in columns.values()] for row in rows)])


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} x" if ratio < 100 else f"{ratio:.0f} x"


def _speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.{0 if tokens_per_second >= 100 else 1}f}"
