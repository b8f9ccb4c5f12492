"""How many greedy answers of --exact are those of the full cache, token by token, and how near those are that differ.

    python3 scripts/dev.py python experiments/check_exact.py --answers 1000 --threads 1

Held-out scenes of the demo model, one and four images. Each answer is 40 tokens, whatever the model says: ends are
forbidden. Two sessions take turns, `full` and an exact one of a preset and a budget; presets and budgets go round.
Where answers differ, the margin is what lies between the two tokens in the logits of the full cache at that place:
batches add numbers up in another order, so that a tie may fall otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import numpy as np
import scriptpath  # noqa: F401
from llama_source import log

import pykvedge
from kvedge_lab.eval.tasks import demo_samples
from pykvedge import Sampling, Session
from pykvedge.errors import KvedgeError
from pykvedge.plans.presets import methods

BUDGETS = (0.05, 0.1, 0.2, 0.5)


def plans() -> list[Any]:
    """Lists presets that drop nothing while an answer is generated and need no profile, at each budget."""
    found = []
    for name in methods():
        if name == "full":
            continue
        for budget in BUDGETS:
            try:
                plan = pykvedge.plan(name, budget)
            except KvedgeError:
                continue
            if not plan.drops and not plan.profile_kinds():
                found.append(plan)
    return found


def answer(session: Session, sample: Any, sampling: Sampling) -> tuple[list[int], Any]:
    message = sample.messages()[-1]
    session.clear()
    said = session.ask(message.text, message.pictures, sampling)
    said.read()
    return said._generation.tokens, said.report


def margin(session: Session, sample: Any, tokens: list[int], other: int) -> float:
    """Reads an answer of the full cache up to its last token, and compares that one with another."""
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
    args = parser.parse_args()
    count = args.answers // 2
    one = demo_samples("code", count, args.seed, 1)
    four = demo_samples("which-image", args.answers - count, args.seed, 4)
    samples = [s for pair in itertools.zip_longest(one, four) for s in pair if s is not None]
    kinds = plans()
    full = Session(plan=pykvedge.plan("full"), threads=args.threads, n_ctx=2048)
    exact = Session(plan=kinds[0], threads=args.threads, n_ctx=2048, keep="ram", exact=True)
    vocabulary = full.model
    ends = {t: float("-inf") for t in range(vocabulary.n_vocab) if vocabulary.is_end(t)}
    sampling = Sampling(max_tokens=args.tokens, logit_bias=ends)
    same, margins, drafted, accepted, batches = 0, [], 0, 0, 0
    for i, sample in enumerate(samples):
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
        "answers": len(samples), "tokens": args.tokens, "plans": len(kinds), "alike": same,
        "margins": [round(m, 5) for m in sorted(margins)],
        "acceptance": round(accepted / max(drafted, 1), 4), "tokens_per_verification": round(1 + accepted / batches, 3),
    }))  # fmt: skip
    exact.close()
    full.close()


if __name__ == "__main__":
    main()
