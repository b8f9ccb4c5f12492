"""What a conversation with many images keeps, reads and answers where images age or are forgotten.

    python3 scripts/dev.py python experiments/measure_ageing.py answers --samples 40
    python3 scripts/dev.py python experiments/measure_ageing.py many --images 200

answers: conversations about five held-out scenes of the packaged model, as many as it was trained to tell apart with
questions behind them: ten questions, the tenth about the third image, which none before asked about. With whole rows,
with --age on top, with the full cache.

many: one conversation of many images. Each image but the newest is forgotten; before each of ten questions about the
third one it is promoted. Their answers are beyond the length that the packaged model was trained for, so they are not
judged: images and tokens that were read, KV pairs and private memory are counted.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import scriptpath  # noqa: F401
from llama_source import log

import pykvedge
from kvedge_lab.demo_tasks.scenes import draw_scene, render
from pykvedge import Sampling, Session
from pykvedge.cli.tables import markdown
from pykvedge.models.images import load_picture
from pykvedge.models.vision import ImagePiece
from pykvedge.runtime.driver import Driver

ANSWER = Sampling(temp=0, max_tokens=12)
ASKED = (1, 2, 4, 5, 1, 2, 4, 5, 1, 3)
THIRD = "What is the code in image 3?"
MIB = 1 << 20


class Reads:
    """Counts what the model reads: images, and tokens of all kinds."""

    def __init__(self) -> None:
        self.images = self.tokens = 0
        decode = Driver.decode

        def counted(driver: Any, at: Any, piece: Any, want_logits: bool) -> None:
            self.images += isinstance(piece, ImagePiece)
            self.tokens += piece.n_tokens
            decode(driver, at, piece, want_logits)

        Driver.decode = counted  # type: ignore[method-assign]


def private() -> float:
    """Returns MiB of memory that is this process's alone."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def ask(session: Session, question: str, picture: Any = None) -> str:
    return session.ask(question, [] if picture is None else [picture], ANSWER).read().strip()


def question(image: int) -> str:
    return f"What is the code in image {image}?" if image > 1 else "What is the code?"


def answers(args: argparse.Namespace) -> dict[str, Any]:
    """Shares of right answers: of all ten questions, and of the tenth. pairs: per head at the tenth."""
    plans = {"full": ("full", None, {}), "keep": (args.method, args.budget, {"keep": "ram"}),
             "age": (args.method, args.budget, {"keep": "ram", "age": args.age})}  # fmt: skip
    out, reads = {}, Reads()
    for name, (method, budget, settings) in plans.items():
        rng, right, pairs, images = np.random.default_rng(args.seed), [], [], reads.images
        with Session(plan=pykvedge.plan(method, budget), threads=args.threads, n_ctx=4096, **settings) as session:
            for _ in range(args.samples):
                scenes = [draw_scene(rng, held_out=True) for _ in range(5)]
                session.clear()
                for i, scene in enumerate(scenes):
                    ask(session, question(i + 1), load_picture(render(scene)))
                right.append([ask(session, f"What is the code in image {k}?") == scenes[k - 1].code for k in ASKED])
                pairs.append(session.engine.pairs_held())
        share, tenth = np.mean(right), np.mean([one[-1] for one in right])
        out[name] = {"right": round(100 * float(share), 1), "tenth": round(100 * float(tenth), 1),
                     "pairs": round(float(np.mean(pairs))), "images read": reads.images - images}  # fmt: skip
        log(f"{name}: {out[name]}")
    return out


def rows_of(session: Session, image: int) -> list[list[int]]:
    """Tokens of an image that each head holds."""
    cache, span = session.engine.cache, session.engine.sequence.images[image - 1]
    assert cache is not None
    return [[t for t in cache.tokens(i, h) if span.first <= t < span.last]
            for i, heads in enumerate(cache.lengths()) for h in range(len(heads))]  # fmt: skip


def many(args: argparse.Namespace) -> list[dict[str, Any]]:
    rng, reads, out = np.random.default_rng(args.seed), Reads(), []
    plan, every = pykvedge.plan(args.method, args.pairs), args.images // 10
    n_ctx = args.images * 220
    with (
        tempfile.TemporaryDirectory() as folder,
        Session(
            plan=plan, threads=args.threads, keep="disk", keep_folder=folder, n_ctx=n_ctx, image_cache=args.image_cache
        ) as session,
    ):
        for i in range(1, args.images + 1):
            if i > 1:
                session.forget_image(i - 1)
            ask(session, question(i), load_picture(render(draw_scene(rng, held_out=True))))
            if i % every or i < 3:
                continue
            session.promote(3)
            ask(session, THIRD)
            sequence, cache = session.engine.sequence, session.engine.cache
            assert cache is not None
            stats, third = cache.stats(), rows_of(session, 3)
            out.append({
                "images": i, "images read": reads.images, "tokens": sequence.n_cells, "tokens read": reads.tokens,
                "pairs": round(session.engine.pairs_held()), "of image 3": round(float(np.mean([*map(len, third)]))),
                "KV MiB": round(stats.bytes / MIB, 2), "whole MiB": round(stats.whole_bytes / MIB, 1),
                "in the file": round(stats.whole_file_bytes / MIB, 1), "private MiB": round(private(), 1),
            })  # fmt: skip
            log(json.dumps(out[-1]))
            session.forget_image(3)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("answers", "many"))
    parser.add_argument("--method", default="kvedge")
    parser.add_argument("--budget", type=float, default=0.3, help="of answers")
    parser.add_argument("--pairs", type=int, default=256, help="of many")
    parser.add_argument("--age", type=float, default=0.5)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--image-cache", type=int, default=0, help="bytes of encoded images in memory, of many")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    if args.what == "answers":
        print(json.dumps(answers(args)))
        return
    rows = many(args)
    print(markdown([list(rows[0]), *([str(value) for value in row.values()] for row in rows)]))


if __name__ == "__main__":
    main()
