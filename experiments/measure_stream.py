"""Measures the memory of a stream, image after image: kvedge's count, the system's count, and a full cache's.

    python3 scripts/dev.py python experiments/measure_stream.py --model DIR/model.gguf --mmproj DIR/mmproj.gguf
    python3 scripts/dev.py python experiments/measure_stream.py --model ... --mmproj ... --method h2o --bound 512 --json

scripts/make_shape_model.py llava-1.4b -o DIR writes a model of the shape in question. Pictures are random. The stream
asks for a picture after it has read, encoded and compressed the previous one: a row of the table is the memory at that
moment. `full` is the size of an uncompressed cache of the same number of tokens, from its shape. The last line is the
largest difference of a column from its value after the fourth image, in percent.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pykvedge
from pykvedge.chat.session import Session
from pykvedge.errors import KvedgeError
from pykvedge.models.images import Picture
from pykvedge.runtime.sampling import Sampling
from pykvedge.system import memory

MIB = 2**20
SETTLED = 4  # number of images after which memory must be flat
COLUMNS = ("images", "tokens", "pairs_per_head", "kv_bytes", "score_bytes", "full_bytes", "rss_bytes")


class Meter:
    """Makes pictures on demand, and notes the memory of the process at these moments."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rows = args, []
        self.session: Session | None = None

    def pictures(self) -> Iterator[Picture]:
        """Yields args.images pictures."""
        side = self.args.size
        for i in range(self.args.images):
            self.note()
            yield Picture(f"{i}.png", side, side, os.urandom(3 * side * side))

    def note(self) -> None:
        """Adds a row, unless nothing was read since the last row."""
        session = self.session
        if session is None or session.engine.cache is None:
            return
        cache, model = session.engine.cache, session.model
        stats = cache.stats()
        n_images = stats.n_image_tokens // self.args.image_tokens
        if n_images <= (self.rows[-1]["images"] if self.rows else 0):
            return
        per_token = stats.n_layers * stats.n_heads_kv * model.pair_width * 2
        pairs = session.engine.pairs_held()
        values = (n_images, stats.n_tokens, pairs, stats.bytes, stats.score_bytes, stats.n_tokens * per_token)
        self.rows.append(dict(zip(COLUMNS, (*values, memory.rss_bytes()), strict=True)))
        if not self.args.json:
            self.show(self.rows[-1])

    def show(self, row: dict[str, Any]) -> None:
        """Prints one line of the table, with the heading before the first line. Bytes are in MiB."""
        if len(self.rows) == 1:
            print("  ".join(name.replace("_bytes", " MiB").rjust(14) for name in COLUMNS))
        cells = [f"{v / MIB:.1f}" if name.endswith("_bytes") else f"{v:g}" for name, v in row.items()]
        print("  ".join(text.rjust(14) for text in cells), flush=True)

    def strays(self) -> dict[str, float]:
        """Returns the largest deviation of each column in percent."""
        later = self.rows[SETTLED - 1 :]
        names = ("kv_bytes", "rss_bytes")
        return {n: 100 * max(abs(r[n] - later[0][n]) / later[0][n] for r in later) for n in names} if later else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--mmproj", type=Path, required=True)
    add("--method", default="snapkv", help="(default %(default)s)")
    add("--bound", type=int, default=2048, help="KV pairs per layer and head (default %(default)s)")
    add("--images", type=int, default=40, help="(default %(default)s)")
    add("--image-tokens", type=int, default=576, help="of an image of this model (default %(default)s)")
    add("--size", type=int, default=336, help="pixels of a picture's side (default %(default)s)")
    add("--ctx", type=int, default=0, help="(default: automatic)")
    add("--threads", type=int, default=0)
    add("--answer", type=int, default=16, metavar="N", help="tokens to generate at the end (default %(default)s)")
    add("--json", action="store_true")
    args = parser.parse_args()
    meter = Meter(args)
    try:
        plan = pykvedge.plan(args.method, args.bound)
        settings = {"stream": True, "measure_peak": True, "n_ctx": args.ctx, "threads": args.threads}
        with Session(args.model, args.mmproj, plan, **settings) as session:
            meter.session = session
            answer = session.ask("What happens?", meter.pictures(), Sampling(max_tokens=args.answer))
            meter.note()
            answer.read()
            report = answer.report
    except KvedgeError as error:
        print(f"measure_stream: {error}", file=sys.stderr)
        return 1
    kv, strays = report.kv, meter.strays()
    if args.json:
        out = {"method": args.method, "bound": args.bound, "rows": meter.rows, "strays_percent": strays}
        print(json.dumps({**out, "report": report.as_json()}, indent=2))
        return 0
    print(
        f"\nafter image {SETTLED}: "
        + ", ".join(f"{n.replace('_bytes', '')} within {x:.2f} %" for n, x in strays.items())
    )
    peak = report.rss.peak_bytes or 0
    print(f"largest: KV and scores {kv.peak_bytes / MIB:.1f} MiB, RSS {peak / MIB:.1f} MiB")
    print(f"prompt: {report.tokens.prompt} tokens in {report.time.prefill_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
