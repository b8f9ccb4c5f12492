"""Counts the answers of --exact that equal the full cache's, token by token, and measures the margin of the others.

    python3 scripts/dev.py python experiments/check_exact.py --answers 1000 --threads 1
    python3 scripts/dev.py python experiments/check_exact.py --answers 100 --threads 1 --model pages

The questions are about held-out scenes of the packaged model, one or four, or about pages of the second model (M-RoPE,
one KV head), one or three. Every third message is a passage of docs without a picture. Each answer has 40 tokens: end
tokens are forbidden. Two sessions answer: `full`, and an exact one. Its presets and budgets take turns.

For a different answer, the margin is the difference of the two tokens' logits in the full cache at that place: batches
add numbers in another order, so a tie may fall otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
from contextlib import suppress
from typing import Any

import numpy as np
import scriptpath  # noqa: F401
from llama_source import ROOT, log

import pykvedge
from kvedge_lab.eval.tasks import PAGES, DialogMessage, Sample, demo_samples, page_samples
from pykvedge import Sampling, Session
from pykvedge.errors import ProfileError
from pykvedge.plans.plan import Plan
from pykvedge.plans.presets import methods

BUDGETS = (0.05, 0.1, 0.2, 0.5)
PAGES_FOLDER = ROOT / "tests" / "data" / "pages"
PAGE_TASKS = ("code", "line", "price", "colour", "left")


def plans(session: Session, names: list[str], budgets: list[float]) -> list[Plan]:
    """Returns each preset at each budget. Leaves out presets without a profile; decode policies become keep-all."""
    found = []
    for name in names:
        if name == "full":
            continue
        for budget in budgets:
            plan = pykvedge.plan(name, budget)
            plan = pykvedge.plan(name, budget, decode="keep-all") if plan.drops else plan
            with suppress(ProfileError):
                session.set_plan(plan)
                found.append(plan)
    return found


def samples(args: argparse.Namespace) -> list[Sample]:
    """Draws questions about one picture, about several and about none, in turn."""
    each = -(-args.answers // 3)
    if args.model == "demo":
        one, four = demo_samples("code", each, args.seed, 1), demo_samples("which-image", each, args.seed, 4)
    else:
        one, four = asked_of_pages(each, args.seed, 1), asked_of_pages(each, args.seed, 3)
    turns = zip(one, four, passages(each, args.seed), strict=True)
    return list(itertools.chain.from_iterable(turns))[: args.answers]


def passages(count: int, seed: int) -> list[Sample]:
    """Draws passages of the documentation."""
    text = "".join(path.read_text().replace("<image>", "") for path in sorted((ROOT / "docs").glob("*.md")))
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        begin, length = int(rng.integers(len(text) - 800)), int(rng.integers(100, 800))
        found.append(Sample(f"passage-{i}", "passage", (DialogMessage("user", text[begin : begin + length]),), ""))
    return found


def asked_of_pages(count: int, seed: int, pages: int) -> list[Sample]:
    """Draws questions of all kinds of page tasks, in turn."""
    each = -(-count // len(PAGE_TASKS))
    drawn = [page_samples(PAGES + task, each, seed, pages) for task in PAGE_TASKS]
    return [sample for turn in zip(*drawn, strict=True) for sample in turn][:count]


def answer(session: Session, sample: Any, sampling: Sampling) -> tuple[list[int], Any]:
    message = sample.messages()[-1]
    session.clear()
    said = session.ask(message.text, message.pictures, sampling)
    said.read()
    return said._generation.tokens, said.report


def margin(session: Session, sample: Any, tokens: list[int], other: int) -> float:
    """Returns the logit of the answer's last token minus that of the token `other`, in the full cache."""
    message = sample.messages()[-1]
    session.clear()
    session.ask(message.text, message.pictures, Sampling(max_tokens=1)).close()
    for token in tokens[:-1]:
        session.engine.extend(token)
    logits = np.array(session.engine.context.logits())
    return float(logits[tokens[-1]] - logits[other])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--method", nargs="+", default=methods())
    parser.add_argument("--budget", nargs="+", type=float, default=BUDGETS)
    parser.add_argument("--ends", action="store_true", help="answers end where the model ends them")
    parser.add_argument("--model", choices=("demo", "pages"), default="demo")
    args = parser.parse_args()
    asked = samples(args)
    files = [] if args.model == "demo" else [PAGES_FOLDER / f"pages-{part}.gguf" for part in ("model", "mmproj")]
    full = Session(*files, plan=pykvedge.plan("full"), threads=args.threads, n_ctx=2048)
    exact = Session(*files, plan=pykvedge.plan("snapkv", 0.5), threads=args.threads, n_ctx=2048, keep="ram", exact=True)
    answer(exact, asked[0], Sampling(max_tokens=1))  # a session searches profiles when it has a cache
    kinds = plans(exact, args.method, args.budget)
    vocabulary = full.model
    ends = {t: float("-inf") for t in range(vocabulary.n_vocab) if vocabulary.is_end(t)}
    sampling = Sampling(max_tokens=args.tokens, logit_bias={} if args.ends else ends)
    same, margins, drafted, accepted, batches = 0, [], 0, 0, 0
    for i, sample in enumerate(asked):
        exact.clear()
        exact.set_plan(kinds[i % len(kinds)])
        expected, _ = answer(full, sample, sampling)
        found, report = answer(exact, sample, sampling)
        if not report.drafts.exact:
            raise SystemExit(f"answer {i} was not verified over whole rows: {report.notes}")
        drafted, accepted = drafted + report.drafts.drafted, accepted + report.drafts.accepted
        batches += report.drafts.verifications
        if found == expected:
            same += 1
        else:
            at = next(k for k, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
            margins.append(margin(full, sample, expected[: at + 1], found[at]))
            log(f"answer {i} ({exact.plan.method} {exact.plan.budget}) differs at token {at}, margin {margins[-1]:.2g}")
        if i % 50 == 49:
            log(f"{i + 1} answers, {same} alike")
    print(json.dumps({
        "model": args.model, "answers": len(asked), "tokens": args.tokens, "plans": len(kinds), "alike": same,
        "margins": [round(m, 5) for m in sorted(margins)],
        "acceptance": round(accepted / max(drafted, 1), 4), "tokens_per_verification": round(1 + accepted / batches, 3),
    }))  # fmt: skip
    exact.close()
    full.close()


if __name__ == "__main__":
    main()
