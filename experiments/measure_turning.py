"""Measures the cost of turning a stream's keys to smaller positions: KL of the next token, share of right answers.

    python3 scripts/dev.py python experiments/measure_turning.py                  # the packaged model
    python3 scripts/dev.py python experiments/measure_turning.py --budget 128 --images 4 --samples 50
    python3 scripts/dev.py python experiments/measure_turning.py --talk 400 --samples 4 --within 1024

A stream reads held-out scenes. Then its positions are reduced to a share, and a question follows. Another stream goes
on without a change. Positions stay within the trained length in both, so that only the turn makes a difference.
KL(unchanged || turned) is of each token of the unchanged stream's answer, which both read. `gaps`: the share of
positions whose token no head holds; a larger reduction moves older tokens closer together. `answers`: right answers of
both.

--talk: this number of questions about one scene in one stream, which keeps the scene and the newest tokens
(streaming-llm). Prints the share of right answers of each hundred, with counted and with turned positions. --within:
the largest position of the turned stream.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import numpy as np

import pykvedge
from kvedge_lab.demo_tasks.prompts import show_text
from kvedge_lab.demo_tasks.scenes import Scene, draw_scene, render
from kvedge_lab.demo_tasks.tasks import (
    Question,
    ask_code,
    ask_colour,
    ask_describe,
    ask_shape,
    ask_where,
    ask_which_image,
)
from pykvedge.chat.session import Session
from pykvedge.models.images import Picture
from pykvedge.runtime.loaded import LoadedModel
from pykvedge.runtime.sampling import Sampling

TALK = (ask_code, ask_colour, ask_shape, ask_where)
ASKS = (ask_code, ask_which_image, ask_describe)


def drawn(seed: int, n_images: int) -> tuple[list[Scene], Question]:
    """Draws scenes and a question about one of them. The same seed gives the same scenes."""
    rng = np.random.default_rng([seed, n_images])
    while True:
        scenes = [draw_scene(rng, True) for _ in range(n_images)]
        question = ASKS[seed % len(ASKS)](rng, scenes, int(rng.integers(0, n_images)))
        if question is not None:
            return scenes, question


@contextlib.contextmanager
def read(model: LoadedModel, plan: pykvedge.Plan, scenes: list[Scene]) -> Iterator[Session]:
    """Yields a stream that has read the scenes."""
    pictures = [Picture(f"{i}.png", 240, 240, render(s).tobytes()) for i, s in enumerate(scenes)]
    with pykvedge.Session(model, plan=plan, stream=True, positions="count") as session:
        session.ask(show_text(len(scenes)), pictures, Sampling(max_tokens=4)).read()
        yield session


def turn(session: Session, share: float) -> float:
    """Reduces the positions to a share. Returns the share of gaps before."""
    sequence, cache = session.engine.sequence, session.engine.cache
    assert cache is not None
    lengths = cache.lengths()
    held = {t for i, heads in enumerate(lengths) for h in range(len(heads)) for t in cache.tokens(i, h)}
    n = sequence.n_past
    sequence.renumber(int(n * share))
    return 1 - len(held) / n


def log_shares(session: Session) -> np.ndarray:
    """Returns the logarithms of the next token's probabilities, [n_vocab]."""
    logits = session.engine.context.logits().astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def compare(plain: Session, turned: Session, question: str, most: int) -> list[float]:
    """Returns the KL of each token of the plain stream's answer, including the first token."""
    answers = [session.ask(question, (), Sampling(max_tokens=most)) for session in (plain, turned)]
    out: list[float] = []
    while len(out) < most:
        p, q = log_shares(plain), log_shares(turned)
        out.append(float((np.exp(p) * (p - q)).sum()))
        token = int(p.argmax())
        if plain.model.is_end(token):
            break
        for session in (plain, turned):
            session.engine.extend(token)
    for answer in answers:
        answer.close()
    return out


def talk(model: LoadedModel, n_questions: int, seed: int, positions: str | int) -> tuple[list[bool], int, int]:
    """Returns whether each answer is right, the last position, and how often positions turned."""
    rng = np.random.default_rng(seed)
    scene, right = draw_scene(rng, True), []
    picture = Picture("0.png", 240, 240, render(scene).tobytes())
    plan = pykvedge.plan("streaming-llm", 400, sinks=160, recent=240)
    with pykvedge.Session(model, plan=plan, stream=True, positions=positions) as session:
        while len(right) < n_questions:
            question = TALK[int(rng.integers(0, len(TALK)))](rng, [scene], 0)
            if question is not None:
                images = [] if right else [picture]
                answer = session.ask(question.text, images, Sampling(max_tokens=30))
                right.append(answer.read().strip() == question.answer)
        stream = answer.report.stream
    assert stream is not None
    return right, stream.positions, stream.turned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="mixkv")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.75, 0.5, 0.25])
    parser.add_argument("--talk", type=int, default=0, metavar="QUESTIONS")
    parser.add_argument("--within", type=int, default=0, metavar="POSITIONS")
    args = parser.parse_args()
    if args.talk:
        for positions in ("count", args.within or "turn"):
            made = [talk(pykvedge.load(), args.talk, seed, positions) for seed in range(args.samples)]
            right = np.mean([m[0] for m in made], axis=0)
            shares = [f"{right[i : i + 100].mean():.3f}" for i in range(0, args.talk, 100)]
            print(f"{positions}: {' '.join(shares)}; positions {made[0][1]}, turned {made[0][2]} times", flush=True)
        return
    model, plan = pykvedge.load(), pykvedge.plan(args.method, args.budget)
    print(f"{args.method}, {args.budget} pairs, {args.images} images, {args.samples} questions")
    for share in args.shares:
        kl: list[float] = []
        gaps, right = [], np.zeros(2, int)
        for seed in range(args.samples):
            scenes, question = drawn(seed, args.images)
            with read(model, plan, scenes) as plain, read(model, plan, scenes) as turned:
                gaps.append(turn(turned, share))
                kl += compare(plain, turned, question.text, 60)
            for i, to in enumerate((1.0, share)):
                with read(model, plan, scenes) as session:
                    if to < 1:
                        turn(session, to)
                    text = session.ask(question.text, (), Sampling(max_tokens=200)).read().strip()
                    right[i] += text == question.answer
        found = f"mean {np.mean(kl):.5f}, median {np.median(kl):.5f}, max {max(kl):.4f}"
        print(f"to {share}: gaps {np.mean(gaps):.2f}, KL of {len(kl)} tokens: {found}; answers {right[0]} as it is, "
              f"{right[1]} turned", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
