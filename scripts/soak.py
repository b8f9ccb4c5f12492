"""Runs many chats and images in one process. Private memory, handles and threads must not grow.

    .venv/bin/python scripts/soak.py                            # 10,000 chats, then 1,000 images in one stream
    .venv/bin/python scripts/soak.py --hours 24 --json          # both in turn until the time is over
    .venv/bin/python scripts/soak.py --chats 200 --images 50 --model m.gguf --mmproj mm.gguf

Chats take turns: only text, two turns and an undo, a picture, saving and loading a session file, a fork, a grammar;
with each method in turn. The exit code is 1 if a figure has grown: its median over the last fifth of the samples
against its median over the second fifth.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from llama_source import ROOT, ended

import pykvedge
from pykvedge.models.images import Picture
from pykvedge.runtime.sampling import Sampling
from pykvedge.system import memory

DATA = ROOT / "pykvedge" / "data"
METHODS = ("lookm", "mixkv", "h2o", "snapkv", "flashcache", "elastic", "prefixkv", "full")
WORDS = "The quick brown fox jumps over the lazy dog and looks at the picture. " * 4
SHORT = Sampling(max_tokens=4)
SAMPLES = 50  # samples of each part
LEAST = 10  # fewer samples are not judged
# allowed growth of a median: the C library keeps some pages
ALLOWED = {"private_bytes": 2 << 20, "handles": 0, "threads": 0, "children": 0}


@dataclass(frozen=True)
class Sample:
    """The resources of the process after `done` chats or images."""

    part: str
    done: int
    seconds: float
    private_bytes: int
    handles: int
    threads: int
    children: int


class Watch:
    """Takes samples of this process."""

    def __init__(self, tell: Callable[[Sample], None]) -> None:
        self._process, self._started, self._tell = psutil.Process(), time.monotonic(), tell
        self.samples: list[Sample] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def look(self, part: str, done: int) -> None:
        gc.collect()
        memory.trim()  # freed memory that the C library keeps is no leak
        process = self._process
        handles = process.num_handles() if sys.platform == "win32" else process.num_fds()
        found = Sample(part, done, round(self.seconds, 1), memory.own_bytes(), handles, process.num_threads(),
                       len(process.children()))  # fmt: skip
        self.samples.append(found)
        self._tell(found)


def grown(samples: list[Sample]) -> dict[str, int]:
    """Returns the figures of one part that have grown beyond ALLOWED, with the growth. Few samples: {}."""
    fifth = len(samples) // 5
    if len(samples) < LEAST:
        return {}
    out = {}
    for name, allowed in ALLOWED.items():
        figures = [getattr(sample, name) for sample in samples]
        more = round(statistics.median(figures[-fifth:]) - statistics.median(figures[fifth : 2 * fifth]))
        if more > allowed:
            out[name] = more
    return out


def picture(i: int, size: int = 96) -> Picture:
    """Returns picture number i; all pictures differ."""
    row = bytes((x * 7 + i * 31) % 256 for x in range(size * 3))
    return Picture(f"{i}.png", size, size, b"".join(bytes([(i + y) % 256]) + row[1:] for y in range(size)))


def chat(model: pykvedge.LoadedModel, i: int, folder: Path) -> None:
    """Runs conversation number i."""
    method, kind = METHODS[i % len(METHODS)], (i + i // 24) % 6  # each method meets each kind of chat
    plan = pykvedge.plan(method, *([] if method == "full" else [0.3]))
    with pykvedge.Session(model, plan=plan, n_ctx=1024, undo=kind == 1) as session:
        images = [picture(i)] if kind == 2 and model.sees_images else []
        sampling = Sampling(max_tokens=4, grammar='root ::= "a" | "b"') if kind == 5 and i % 4 == 1 else SHORT
        session.ask(WORDS, images, sampling).read()
        if kind == 1:
            session.ask("And then?", sampling=SHORT).read()
            session.undo()
        elif kind == 3:
            session.save(folder / "talk.kvs")
            session.load(folder / "talk.kvs")
            session.ask("And then?", sampling=SHORT).read()
        elif kind == 4:
            with session.fork() as other:
                other.ask("And then?", sampling=SHORT).read()


def chats(model: pykvedge.LoadedModel, n: int, watch: Watch) -> None:
    every = max(n // SAMPLES, 1)
    with tempfile.TemporaryDirectory(prefix="kvedge-soak-") as folder:
        for i in range(n):
            chat(model, i, Path(folder))
            if (i + 1) % every == 0:
                watch.look("chats", i + 1)


def images(model: pykvedge.LoadedModel, n: int, watch: Watch) -> None:
    """Reads n pictures in one stream, and answers at the end."""
    every = max(n // SAMPLES, 1)

    def watched() -> Iterator[Picture]:
        for i in range(n):
            if i and i % every == 0:
                watch.look("images", i)
            yield picture(i)

    with pykvedge.Session(model, plan=pykvedge.plan("snapkv", 256), stream=True) as session:
        report_of = session.ask("What is this?", watched(), SHORT)
        report_of.read()
    watch.look("images", n)


def soak(args: argparse.Namespace, watch: Watch) -> list[tuple[str, list[Sample]]]:
    """Runs all parts. Returns the samples of each part, of all rounds together."""
    # caches that fill up are no leak, so they are small here
    with pykvedge.load(args.model, args.mmproj, threads=args.threads, image_cache=1 << 20, prompt_cache=0) as model:
        rounds = 0
        while rounds == 0 or watch.seconds < args.hours * 3600:
            if args.chats:
                chats(model, args.chats, watch)
            if args.images and model.sees_images:
                images(model, args.images, watch)
            rounds += 1
    return [(part, [s for s in watch.samples if s.part == part]) for part in ("chats", "images")]


def main() -> int:
    """Returns 1 if something has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--chats", type=int, default=10_000, metavar="N", help="conversations (default %(default)s)")
    add("--images", type=int, default=1_000, metavar="N", help="pictures in a stream (default %(default)s)")
    add("--hours", type=float, default=0.0, metavar="H", help="go on with both until so much time is over")
    add("--model", type=Path, default=DATA / "demo-model.gguf", help="default: the packaged one")
    add("--mmproj", type=Path, help="its image encoder")
    add("--threads", type=int, default=1)
    add("--json", action="store_true", help="one object on stdout, with all samples")
    args = parser.parse_args()
    if args.mmproj is None and args.model == DATA / "demo-model.gguf":
        args.mmproj = DATA / "demo-mmproj.gguf"

    def tell(sample: Sample) -> None:
        print(json.dumps(asdict(sample)), flush=True, file=sys.stderr if args.json else sys.stdout)

    watch = Watch(tell)
    found = {part: grown(samples) for part, samples in soak(args, watch)}
    if args.json:
        print(json.dumps({"grown": found, "samples": [asdict(sample) for sample in watch.samples]}))
    else:
        for part, more in found.items():
            says = ", ".join(f"{name} by {amount}" for name, amount in more.items())
            print(f"{part}: {'grown: ' + says if says else 'nothing has grown'}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(ended(main))
