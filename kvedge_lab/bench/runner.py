"""Runs a matrix in rounds. Each round measures every variant once, so a change of speed affects all variants."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvedge_lab.bench import machine
from kvedge_lab.bench.machine import Bandwidth, Watch
from kvedge_lab.bench.matrix import MAX_ROUNDS, STOCK, Matrix, ModelFiles, Shape, Variant
from kvedge_lab.bench.measure import Loaded, Prompt, Repetition, again, figures, make_prompt, repetition
from kvedge_lab.bench.timeline import Trace, trace
from kvedge_lab.jsonlines import JsonLines
from kvedge_lab.progress import Steps
from pykvedge.errors import ContextError, ImageError, KvedgeError, OutOfMemoryError, UsageError
from pykvedge.models.encoder import Encoder
from pykvedge.models.model import Model
from pykvedge.models.vision import Vision
from pykvedge.native import llamacpp
from pykvedge.reference.kvtypes import KvType
from pykvedge.runtime.interrupt import CancelledError, stop_if_set
from pykvedge.runtime.llama_context import ContextSize, check_memory
from pykvedge.system import memory


@dataclass
class Group:
    """One prompt on one model: per variant, one repetition per round."""

    model: str
    shape: Shape
    n_tokens: int
    n_image_tokens: int
    encode_s: float
    stock_encode_s: float
    weight_bytes: int  # bytes read per token
    kv_bytes_per_token: int  # of a full f16 cache
    rounds: dict[Variant, list[Repetition]] = field(default_factory=dict)
    device_peaks: dict[Variant, int] = field(default_factory=dict)  # bytes, if the devices report them


@dataclass
class Outcome:
    """All results. left_out: lines that say what is missing and why. traces: only if requested."""

    machine: dict[str, Any] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    interrupted: bool = False
    bandwidth: Bandwidth | None = None
    traces: list[Trace] = field(default_factory=list)


def new_log(path: Path | None) -> JsonLines:
    """Opens the file of raw repetitions as JSON lines. Each is written before the next is measured.

    Raises UsageError if the file exists and is not empty, SaveError if it cannot be written.
    """
    if path is not None and path.is_file() and path.stat().st_size:
        raise UsageError(f"{path} exists; give --save another file")
    return JsonLines(path)


def run(
    matrix: Matrix, log: JsonLines, out: Outcome, display: Steps | None = None, cancel: threading.Event | None = None
) -> None:
    """Measures into `out`, which holds the results so far even after an error.

    Setting `cancel` ends the run. Raises ModelError, LibraryError, SaveError. Prompts that do not fit, and variants
    that fail, are left out and listed.
    """
    cancel, display = cancel or threading.Event(), display or Steps(enabled=False)
    threads = matrix.threads or llamacpp.default_threads()
    out.machine = machine.describe(threads)
    out.bandwidth = Bandwidth(threads)
    display.step("reading memory", 0)
    out.bandwidth.look()
    log.add({"kvedge_bench": 1, "machine": out.machine})
    bench = _Bench(matrix, threads, log, out, display, cancel)
    try:
        for files in matrix.models:
            bench.measure(files)
        out.bandwidth.look()
    except CancelledError:
        out.interrupted = True
    finally:
        display.done()


@dataclass
class _Bench:
    """Measures the matrix with one model after another."""

    matrix: Matrix
    threads: int
    log: JsonLines
    out: Outcome
    display: Steps
    cancel: threading.Event

    def measure(self, files: ModelFiles) -> None:
        vision: Vision | None = None
        stock: Encoder | None = None
        with ExitStack() as held:
            model = held.enter_context(closing(Model(files.model, self.matrix.offload, self.display, self.cancel)))
            if files.mmproj is not None and any(shape.images for shape in self.matrix.shapes):
                on_gpu = not self.matrix.offload.cpu_only
                vision = Vision(Encoder(files.mmproj, model, self.threads, on_gpu, False))
                held.callback(vision.encoder.close)
                if not vision.encoder.on_device:
                    stock = Encoder(files.mmproj, model, self.threads, on_gpu, False, packed=False)
                    held.callback(stock.close)
            loaded = Loaded(model, vision, self.threads, self.cancel, look=self._look)
            for shape in self.matrix.shapes:
                self._prompt(files.name, loaded, stock, shape)

    def _prompt(self, model: str, loaded: Loaded, stock: Encoder | None, shape: Shape) -> None:
        name, variants = f"{model}, {shape.name}", [Variant(STOCK), *self.matrix.variants]
        stop_if_set(self.cancel)
        try:
            self._check_room(loaded.model, shape)
            prompt = self._made(loaded, shape, stock, self.matrix.later)
        except (ImageError, OutOfMemoryError) as error:
            self._leave_out(f"{name} left out: {error}", len(variants) * (self.matrix.repeat + 1))
            return
        group = Group(model, shape, prompt.n_tokens, prompt.n_image_tokens, prompt.encode_s, prompt.stock_encode_s,
                      machine.weight_bytes_per_token(loaded.model.header),
                      loaded.model.kv_bytes_per_token(2))  # fmt: skip
        self.out.groups.append(group)
        try:
            self._rounds(group, variants, loaded, prompt)
            for variant in group.rounds if self.matrix.device_peak else ():
                self.display.step(f"{name}: memory of devices, {variant.label}", 0)
                with Watch(machine.device_bytes, 0.001) as used:
                    self._once(loaded, prompt, variant)
                if max(used.n_bytes) > 0:
                    group.device_peaks[variant] = max(used.n_bytes)
        finally:
            loaded.release(prompt)
        for variant in group.rounds if self.matrix.timeline else ():
            self.display.step(f"{name}: memory of {variant.label}", 0)
            self.out.traces.append(self._watched(name, loaded, shape, variant))

    def _check_room(self, model: Model, shape: Shape) -> None:
        """Raises OutOfMemoryError for a prompt that no variant can hold, if each image is one token."""
        n, more = shape.text_tokens + shape.images, self.matrix.generate + self.matrix.later
        types = (KvType.parse(one.kv_type) for one in self.matrix.variants)
        smallest = min(types, key=lambda one: one.plain.bytes_per_value, default="f16")
        advice = "use fewer --tokens or --images,"
        check_memory(model, ContextSize(n + more + 1, kv_type=smallest, prompt_tokens=n), self.threads, False, advice)
        pictures = 3 * shape.width * shape.height * shape.images
        memory.require(pictures, f"a prompt of {shape.name}", f"{advice} or close other programs")

    def _made(self, loaded: Loaded, shape: Shape, stock: Encoder | None = None, later: int = 0) -> Prompt:
        what = "encoding images" if shape.images else "making the prompt"

        def look(_: float) -> None:
            stop_if_set(self.cancel)
            self.display.step(f"{shape.name}: {what}", 0)

        return make_prompt(loaded.model, loaded.vision, shape, self.matrix.generate, look, stock, later)

    def _watched(self, name: str, loaded: Loaded, shape: Shape, variant: Variant) -> Trace:
        """Runs a measured variant once more, from the encoding of pictures on, and returns a trace of its memory."""
        memory.trim()
        with Watch() as watch:
            prompt = self._made(loaded, shape)
            encoded = time.perf_counter() if shape.images else watch.began
            try:
                marks = self._once(loaded, prompt, variant).marks
            finally:
                loaded.release(prompt)
        return trace(name, variant, watch, encoded, marks)

    def _once(self, loaded: Loaded, prompt: Prompt, variant: Variant) -> Repetition:
        out = repetition(loaded, prompt, variant)
        if self.matrix.again and prompt.n_image_tokens:
            out.again_s = again(loaded, prompt, variant)
        return out

    def _rounds(self, group: Group, variants: list[Variant], loaded: Loaded, prompt: Prompt) -> None:
        name = f"{group.model}, {group.shape.name}"
        for turn, left in self._turns(len(variants)):
            for variant in list(variants):
                stop_if_set(self.cancel)
                try:
                    measured = self._once(loaded, prompt if turn else prompt.warm_up(), variant)
                except ContextError as error:
                    self._leave_out(f"{name} left out: {error}", len(variants) * left)
                    return
                except CancelledError:
                    raise
                except KvedgeError as error:
                    variants.remove(variant)
                    self._leave_out(f"{name}, {variant.label} left out: {error}", left)
                    continue
                self.display.step(f"{name}: {variant.label}")
                if turn:
                    group.rounds.setdefault(variant, []).append(measured)
                    self.log.add(_line(group, variant, turn, measured))

    def _turns(self, n_variants: int) -> Iterator[tuple[int, int]]:
        """Yields the number of a round, and the rounds left with it. Round 0 warms up; short rounds are repeated."""
        last, started = self.matrix.repeat, time.monotonic()
        for turn in range(last + 1):
            yield turn, last + 1 - turn
        while last < MAX_ROUNDS and time.monotonic() - started < self.matrix.fill_s:
            last += 1
            self.display.skip(-n_variants)
            yield last, 1

    def _look(self, what: str, share: float) -> None:
        self.display.step(f"{what}, {100 * share:.0f} %", 0)

    def _leave_out(self, text: str, steps: int) -> None:
        self.out.left_out.append(text)
        self.display.skip(steps)
        self.display.say(f"kvedge: {text}")


def _line(group: Group, variant: Variant, turn: int, measured: Repetition) -> dict[str, Any]:
    return {
        "model": group.model,
        "text_tokens": group.shape.text_tokens,
        "images": group.shape.images,
        "tokens": group.n_tokens,
        "variant": variant.name,
        "budget": variant.plan.budget.value if variant.plan else None,
        "kv_type": variant.kv_type,
        **({"keep": variant.keep.place, "keep_type": variant.keep.type} if variant.keep else {}),
        "round": turn,
        **figures(measured),
    }
