"""Runs one variant on one prompt and generates some tokens. Measures times, bytes and energy."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from kvedge_lab.bench.machine import Energy, OtherPrograms
from kvedge_lab.bench.matrix import Shape, Variant
from kvedge_lab.demo_tasks.scenes import draw_scene, render
from pykvedge.errors import UsageError
from pykvedge.models.encoder import Encoder
from pykvedge.models.images import Picture
from pykvedge.models.model import Model, Progress, silent
from pykvedge.models.profiles import tables_for
from pykvedge.models.vision import ImagePiece, Piece, TextPiece, Vision
from pykvedge.runtime import opening
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.interrupt import stop_if_set
from pykvedge.runtime.llama_context import ContextSize, ubatch_for
from pykvedge.runtime.pruning import planned
from pykvedge.runtime.replay import extra_tokens
from pykvedge.runtime.report import DeviceWork
from pykvedge.runtime.sequence import Sequence
from pykvedge.runtime.settings import Keep
from pykvedge.system import memory

PAD = 256  # llama.cpp rounds the tokens of a context up to a multiple of it
WARM_UP_TOKENS = 64
LOOK_AFTER = 256  # generated tokens between two reports of progress
NAME = "bench"  # the model's name in a snapshot that is restored at once


@dataclass
class Prompt:
    """A shape as tokens and encoded images.

    encode_s: of all images; stock_encode_s: by stock llama.cpp.
    """

    shape: Shape
    pieces: list[Piece]
    then: list[int]  # tokens to generate after the prompt
    later: list[int] = field(default_factory=list)  # tokens of a message after these
    encode_s: float = 0.0
    stock_encode_s: float = 0.0

    @property
    def n_tokens(self) -> int:
        return sum(p.n_tokens for p in self.pieces)

    @property
    def n_image_tokens(self) -> int:
        """The number of tokens of images."""
        return sum(p.n_tokens for p in self.pieces if isinstance(p, ImagePiece))

    @property
    def largest_image(self) -> int:
        return max((p.n_tokens for p in self.pieces if isinstance(p, ImagePiece)), default=0)

    def warm_up(self) -> Prompt:
        """Returns a short prompt of the same tokens."""
        tokens = [t for p in self.pieces if isinstance(p, TextPiece) for t in p.tokens]
        return Prompt(self.shape, [TextPiece((tokens or self.then)[:WARM_UP_TOKENS])], self.then[:2], self.later)


def make_prompt(
    model: Model,
    vision: Vision | None,
    shape: Shape,
    generate: int,
    look: Callable[[float], None] = lambda share: None,
    stock: Encoder | None = None,
    later: int = 0,
) -> Prompt:
    """Makes random text (time and memory do not depend on it) and drawn scenes, and encodes the scenes.

    look: called at intervals, during the encoding with the finished share of the image; it may raise. stock: encodes
    each image before `vision`; without `stock`, the time of `vision` counts for both. later: tokens of a later message.
    Raises ImageError.
    """
    rng = np.random.default_rng(0)
    text = _random_tokens(model, rng, shape.text_tokens + generate + later, look)
    before, after = text[: shape.text_tokens // 2], text[shape.text_tokens // 2 : shape.text_tokens]
    pieces: list[Piece] = [TextPiece(before)] if before else []
    spent = stock_spent = 0.0
    if shape.images:
        if vision is None:
            raise UsageError(f"{model.path.name} was loaded without an image encoder; pass --mmproj, or --images 0")
        images = vision.split(vision.marker * shape.images, [_picture(rng, shape) for _ in range(shape.images)])
        try:
            for piece in images:
                if not isinstance(piece, ImagePiece):
                    continue
                began = time.perf_counter()
                if stock is not None and piece.prepared is not None:
                    piece.prepared.encode(piece.part, piece.n_rows, look, stock)
                between = time.perf_counter()
                vision.encode(piece, look)
                spent += time.perf_counter() - between
                stock_spent += between - began
        except BaseException:
            vision.release(images)
            raise
        pieces += images
    pieces.append(TextPiece(after))
    then, last = text[shape.text_tokens :][:generate], text[shape.text_tokens + generate :]
    return Prompt(shape, pieces, then, last, spent, stock_spent if stock is not None else spent)


def _random_tokens(model: Model, rng: np.random.Generator, n: int, look: Callable[[float], None]) -> list[int]:
    low, out = model.n_vocab // 3, list[int]()
    while len(out) < n:
        look(len(out) / n)
        for token in rng.integers(low, model.n_vocab, min(n - len(out), 1 << 12)).tolist():
            if model.piece(token) and not model.is_end(token):
                out.append(token)
    return out


def _picture(rng: np.random.Generator, shape: Shape) -> Picture:
    from PIL import Image

    image = Image.fromarray(render(draw_scene(rng))).resize((shape.width, shape.height))
    return Picture("scene", shape.width, shape.height, image.tobytes())


@dataclass
class Repetition:
    """The seconds, bytes and joules of one repetition (None: the system does not report them). decode_s: per token.

    rss_*: growth of the process since before the context, without the weights. others_s: processor time of other
    programs meanwhile, wall_s: elapsed time. marks: begin of prefill, compression and decoding, and the end,
    by time.perf_counter.
    """

    prefill_s: float
    compress_s: float
    decode_s: list[float] = field(default_factory=list)
    full_bytes: int = 0
    kept_bytes: int = 0
    peak_bytes: int = 0
    device_prompt_bytes: int = 0  # keys, values and their data, when the prompt was read
    device_bytes: int = 0  # the same after the last token
    rss_peak_bytes: int = 0
    rss_after_bytes: int = 0
    prefill_j: float | None = None
    decode_j: float | None = None
    others_s: float = 0.0
    wall_s: float = 0.0
    marks: list[float] = field(default_factory=list)
    prune_s: float = 0.0
    tokens: int = 0  # tokens of the prompt that the model read
    again_s: float | None = None  # prefill and compression of a second conversation about the same images
    later_s: float | None = None  # seconds of a later message
    whole_bytes: int = 0  # whole rows behind kept rows, after the answer
    whole_file_bytes: int = 0  # the part of whole_bytes in a file
    device: DeviceWork | None = None  # work of the prompt's compression, if its rows were on devices
    device_rows: int = 0  # rows on devices then: one per token and KV head


@dataclass
class Loaded:
    """The data that all repetitions with a model share. look: called during a repetition with work and share."""

    model: Model
    vision: Vision | None
    threads: int
    cancel: threading.Event
    energy: Energy = field(default_factory=Energy)
    look: Progress = silent

    def release(self, prompt: Prompt) -> None:
        """Frees the images of a prompt."""
        if self.vision is not None:
            self.vision.release(prompt.pieces)
            self.vision.forget()


def repetition(of: Loaded, prompt: Prompt, variant: Variant) -> Repetition:
    """Runs a variant in a new context. Raises what Context and libkvedge raise, CancelledError."""
    prompt, prune_s = _pruned(prompt, variant, of.threads)
    memory.trim()
    before = memory.rss_bytes()
    meter = memory.PeakMeter()
    meter.start()
    try:
        with _driver(of, prompt, variant, variant.keep) as driver:
            others = OtherPrograms()
            with _uncollected():
                out = _timed(driver, prompt, of)
            out.prune_s, out.tokens = prune_s, prompt.n_tokens
            out.others_s, out.wall_s = others.taken()
            # the meter looks every 10 ms, and may miss the last reading
            out.rss_peak_bytes = max(meter.stop() - before, out.rss_after_bytes - before, 0)
            out.rss_after_bytes = max(out.rss_after_bytes - before, 0)
            if driver.cache is not None:
                out.peak_bytes = driver.cache.stats().peak_bytes
            else:  # llama.cpp allocates for the whole context at once and does not report the size; f16 is its default
                n_bytes = of.model.kv_bytes_per_token(2) * driver.context.n_made
                out.full_bytes = out.kept_bytes = out.peak_bytes = n_bytes
            return out
    finally:
        meter.stop()


@contextmanager
def _driver(of: Loaded, prompt: Prompt, variant: Variant, keep: Keep | None = None) -> Iterator[Driver]:
    """Yields a context with room for a variant and a prompt."""
    again = extra_tokens(variant.plan, prompt.n_tokens, prompt.largest_image) if variant.plan is not None else 0
    n_ctx = -(-(prompt.n_tokens + max(again, len(prompt.then) + len(prompt.later)) + 1) // PAD) * PAD
    size = ContextSize(n_ctx, ubatch_for(of.vision, prompt.largest_image), variant.kv_type, prompt.n_tokens)
    with closing(Driver(of.model, of.vision, size, of.threads, whole_cache=variant.plan is None)) as driver:
        driver.context.stop_when(of.cancel)
        if variant.plan is not None:
            driver.take_over(variant.plan, tables_for(variant.plan, of.model.path), keep=keep)
        yield driver


def _pruned(prompt: Prompt, variant: Variant, threads: int) -> tuple[Prompt, float]:
    """Returns the part of a prompt that the variant's model reads, and the seconds of the choice."""
    if variant.plan is None:
        return prompt, 0.0
    started = time.perf_counter()
    pieces = planned(prompt.pieces, variant.plan, threads)
    return replace(prompt, pieces=pieces), time.perf_counter() - started


def again(of: Loaded, prompt: Prompt, variant: Variant) -> float | None:
    """Returns the seconds of a second conversation about the same images: reading and compressing its question.

    Another context reads, compresses and packs the opening first. Returns None for stock, or for a prompt without an
    opening. Raises what repetition() raises.
    """
    prompt, _ = _pruned(prompt, variant, of.threads)
    before, question = opening.cut(prompt.pieces)
    if variant.plan is None or not before:
        return None
    with _driver(of, prompt, variant) as driver:
        sequence = Sequence(driver)
        sequence.read(before, cancel=of.cancel)
        sequence.compress()
        packed = sequence.snapshot(NAME)
    with _driver(of, prompt, variant) as driver:
        sequence, started = Sequence(driver), time.perf_counter()
        sequence.restore(packed, NAME)
        sequence.read(question, cancel=of.cancel)
        driver.context.logits()  # waits for the device
        sequence.compress()
        return time.perf_counter() - started


@contextmanager
def _uncollected() -> Iterator[None]:
    """Stops Python's garbage collection, which would run at the same places of every run."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _timed(driver: Driver, prompt: Prompt, of: Loaded) -> Repetition:
    context, cache, sequence, energy, cancel = driver.context, driver.cache, Sequence(driver), of.energy, of.cancel
    energy.start()
    began = time.perf_counter()
    sequence.read(prompt.pieces, of.look, cancel)
    context.logits()  # waits for the device
    read = time.perf_counter()
    pending = cache.stats() if cache is not None else None
    lying = pending.device_bytes if pending is not None else 0
    compressing = time.perf_counter()
    sequence.compress()
    compressed = time.perf_counter()
    out = Repetition(read - began, compressed - compressing, prefill_j=energy.joules(), device_prompt_bytes=lying)
    if cache is not None:
        kv = sequence.measure()
        out.full_bytes, out.kept_bytes, out.device = kv.full_bytes, kv.kept_bytes, kv.device
        out.device_rows = cache.rows_on_devices(pending.n_pending) if pending is not None else 0
    out.rss_after_bytes = memory.rss_bytes()
    energy.start()
    for n, token in enumerate(prompt.then):
        stop_if_set(cancel)
        if n % LOOK_AFTER == 0:
            of.look("generating", n / len(prompt.then))
        started = time.perf_counter()
        sequence.extend(token)
        context.logits()
        out.decode_s.append(time.perf_counter() - started)
    out.decode_j = energy.joules()
    out.marks = [began, read, compressed, time.perf_counter()]
    if cache is not None:
        stats = cache.stats()
        out.device_bytes, out.whole_bytes, out.whole_file_bytes = (
            stats.device_bytes, stats.whole_bytes, stats.whole_file_bytes
        )  # fmt: skip
    if prompt.later:
        started = time.perf_counter()
        sequence.read([TextPiece(prompt.later)], cancel=cancel)
        context.logits()
        sequence.compress()
        out.later_s = time.perf_counter() - started
    return out


def figures(repetition: Repetition) -> dict[str, Any]:
    """Returns the repetition for JSON."""
    kept = {name: value for name, value in vars(repetition).items() if name != "marks"}
    device = asdict(repetition.device) if repetition.device else None
    return {**kept, "device": device, "decode_s": [round(s, 7) for s in repetition.decode_s]}
