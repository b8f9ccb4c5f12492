"""Tests whether a storage type of three bits is useful: more rows with fewer bits, at equal bytes.

    python3 scripts/dev.py python experiments/try_three_bits.py --samples 25
    python3 scripts/dev.py python experiments/try_three_bits.py --samples 25 --texture 16

Reducers of this script (docs/plugins.md) round the kept rows as the type would, and the cache holds the result in f16.
The library's types q8_0, q4_0 and tq3 round by their definitions. tq3 came out of this trial; the other candidates are
not in the library. The candidates, after TurboQuant (Zandieh et al. 2025, arXiv:2504.19874):

- turbo2, turbo3, turbo4: a row's norm in half precision; the row is divided by it and turned (channels' signs drawn
  once, then a Hadamard matrix); each number becomes the nearest of 2^bits levels, which Lloyd's rule finds for a
  coordinate of a uniform point on the sphere (Algorithm 1);
- turbo3-fit: the same levels; instead of the norm, the factor that brings them nearest to the row;
- turbo3-sketch: keys have one bit less for the levels; for the rest, its norm and the signs of d Gaussian
  projections (Algorithm 2), which make products with queries right on average; values as turbo3;
- tq3: turned as q4_0 is, nearly the same eight levels, a scale for every 32 numbers, fitted to them;
- uniform3: turned the same way, eight levels at even distances, as q4_0 has sixteen; a scale for every 64 numbers.

Columns: KL divergence of the next token from the full f16 cache's, nats a token along the reference answers, with the
context compressed before its question is read. A row's budget is q4_0's; each type has as many pairs as fit into the
same bytes. In brackets: the 95 % interval of the difference to q4_0 (paired bootstrap over samples). A second table has
the relative squared error of the kept keys and values.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import scriptpath  # noqa: F401
from llama_source import ROOT, log
from measure_pruners import textured
from PIL import Image

import pykvedge
from kvedge_lab.demo_tasks.scenes import render
from kvedge_lab.eval.measure import Cell, MeasureOptions
from kvedge_lab.eval.metrics import paired_interval
from kvedge_lab.eval.records import Records
from kvedge_lab.eval.runner import Job, evaluate
from kvedge_lab.eval.tasks import DialogMessage, Sample, demo_samples
from kvedge_lab.progress import Steps
from pykvedge.cli.tables import markdown
from pykvedge.errors import KvedgeError
from pykvedge.reference.kvtypes import GROUP, definition
from pykvedge.reference.storage import rotated
from pykvedge.runtime.settings import Settings

DATA = ROOT / "pykvedge" / "data"
TASKS = "code-in-image-k,which-image,code,where,describe,difference"
HEAD_SIZE = 64  # head size of the demo model
METHODS = "snapkv,mixkv,calibrated,kvzip"
BASE, SEED, STEPS = "q4_0", 3, 20_000  # the type to compare with; seed of signs and projections; grid of the density
ERRORS: dict[str, np.ndarray] = {}  # by type: (squared error, square) of keys, then of values
Rounded = Callable[[np.ndarray], np.ndarray]  # rounds rows [n, d] float32 as a type does


@functools.cache
def levels(bits: int, d: int) -> np.ndarray:
    """Returns 2^bits levels, ascending, with least squared error for a coordinate of a uniform point on the d-sphere.

    Lloyd's rule on the density (1 - x^2)^((d - 3) / 2), TurboQuant's lemma 1 and equation 4.
    """
    x = np.linspace(-1, 1, STEPS)
    density = (1 - x**2) ** ((d - 3) / 2)
    found = np.linspace(-2, 2, 2**bits) / np.sqrt(d)
    for _ in range(500):
        nearest = np.searchsorted((found[1:] + found[:-1]) / 2, x)
        mass = np.bincount(nearest, density, 2**bits)
        found = np.bincount(nearest, density * x, 2**bits) / mass
    return found.astype(np.float32)


def nearest_level(x: np.ndarray, bits: int) -> np.ndarray:
    """Returns the level nearest to each number of unit rows [n, d]."""
    found = levels(bits, x.shape[-1])
    return found[np.searchsorted((found[1:] + found[:-1]) / 2, x)]


@functools.cache
def signs(d: int) -> np.ndarray:
    return np.random.default_rng(SEED).choice(np.array([-1, 1], np.float32), d)


@functools.cache
def projections(d: int) -> np.ndarray:
    """Returns Gaussian numbers [d, d]."""
    return np.random.default_rng(SEED).normal(size=(d, d)).astype(np.float32)


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def turbo(rows: np.ndarray, bits: int, fit: bool = False, sketch: bool = False) -> np.ndarray:
    d = rows.shape[-1]
    norm = np.linalg.norm(rows, axis=-1, keepdims=True)
    unit = rotated(rows * signs(d), d & -d) / np.maximum(norm, np.float32(1e-30))
    out = nearest_level(unit, bits - sketch)
    if fit:
        norm = norm * (unit * out).sum(axis=-1, keepdims=True) / (out**2).sum(axis=-1, keepdims=True)
    if sketch:
        left = unit - out
        size = half(np.linalg.norm(left, axis=-1, keepdims=True))
        bit = np.where(left @ projections(d).T >= 0, np.float32(1), np.float32(-1))
        out = out + np.float32(np.sqrt(np.pi / 2) / d) * size * (bit @ projections(d))
    return rotated(half(norm) * out, d & -d) * signs(d)


def grouped(rows: np.ndarray, rounded: Rounded, size: int, turn: int) -> np.ndarray:
    """Turns rows, rounds groups of `size` numbers, and turns the rows back."""
    turned = rotated(rows, turn)
    return rotated(rounded(turned.reshape(-1, size)).reshape(rows.shape), turn)


def uniform3(groups: np.ndarray) -> np.ndarray:
    """Rounds as q4_0, with codes from 0 to 7: the number with the largest size becomes -4."""
    place = np.abs(groups).argmax(axis=-1, keepdims=True)
    scale = np.take_along_axis(groups, place, axis=-1) / np.float32(-4)
    codes = np.rint(groups / np.where(scale == 0, np.float32(1), scale)).clip(-4, 3)
    return half(scale) * codes


def library_type(name: str) -> tuple[Rounded, Rounded]:
    """Returns a library type for keys (rotated in the largest block) and for values (rotated in blocks of 64)."""
    rule = definition(name).rounded
    return (lambda k: grouped(k, rule, GROUP, k.shape[-1] & -k.shape[-1])), (lambda v: grouped(v, rule, GROUP, 64))


def both(rounded: Rounded) -> tuple[Rounded, Rounded]:
    return rounded, rounded


# (rounding of keys, of values); mean bits per number in rows of d
TYPES: dict[str, tuple[tuple[Rounded, Rounded], Callable[[int], float]]] = {
    "f16": (both(half), lambda d: 16),
    "q8_0": (library_type("q8_0"), lambda d: 8.5),
    "q4_0": (library_type("q4_0"), lambda d: 4.5),
    "tq3": (library_type("tq3"), lambda d: 3.5),
    "turbo4": (both(functools.partial(turbo, bits=4)), lambda d: 4 + 16 / d),
    "turbo2": (both(functools.partial(turbo, bits=2)), lambda d: 2 + 16 / d),
    "turbo3": (both(functools.partial(turbo, bits=3)), lambda d: 3 + 16 / d),
    "turbo3-fit": (both(functools.partial(turbo, bits=3, fit=True)), lambda d: 3 + 16 / d),
    "turbo3-sketch": (
        (functools.partial(turbo, bits=3, sketch=True), functools.partial(turbo, bits=3)),
        lambda d: 3 + 24 / d,
    ),
    "uniform3": (both(lambda x: grouped(x, uniform3, 64, 64)), lambda d: 3.25),
}


def stage(name: str) -> str:
    """Returns the name of the type's reducer."""
    return "as-" + name.replace("_", "-")


def register() -> None:
    """Registers a reducer for each type: it evicts, and rounds the kept rows."""
    for name, ((keys, values), _) in TYPES.items():

        def stored(head: Any, settings: Any, of: str = name, k: Rounded = keys, v: Rounded = values) -> Any:
            before = head.k[head.kept], head.v[head.kept]
            after = k(before[0]), v(before[1])
            sums = ERRORS.setdefault(of, np.zeros(4))
            sums += [x for a, b in zip(before, after, strict=True) for x in (((a - b) ** 2).sum(), (a**2).sum())]
            return after

        pykvedge.reducer(stage(name), summary=f"rows as {name} would give them back")(stored)


def cells(args: argparse.Namespace) -> list[Cell]:
    out = []
    for method, budget, name in product(args.method, args.budget, args.type):
        share = round(budget * TYPES[BASE][1](args.size) / TYPES[name][1](args.size), 6)
        out.append(Cell(f"{method} {name} at {budget:g}", pykvedge.plan(method, share, reducer=stage(name))))
    return out


def chosen(args: argparse.Namespace, folder: Path) -> list[Sample]:
    """Returns samples of every task. With a texture, their pictures are written into the folder."""
    tasks = [demo_samples(task, args.samples, args.seed, args.images) for task in args.tasks.split(",")]
    drawn = [sample for together in zip(*tasks, strict=True) for sample in together]
    if not args.texture:
        return drawn
    out = []
    for n, sample in enumerate(drawn):
        files, (line,) = [], sample.lines
        for k, scene in enumerate(line.images):
            picture = textured(np.asarray(render(scene)), np.random.default_rng((args.texture, n, k)), args.texture)
            files.append(folder / f"{n:04d}-{k}.png")
            Image.fromarray(picture).save(files[-1])
        lines = (DialogMessage(line.role, line.text, tuple(files)),)
        out.append(Sample(sample.id, sample.task, lines, sample.answer, sample.metric))
    return out


def measured(args: argparse.Namespace) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns records by cell and sample."""
    with tempfile.TemporaryDirectory() as folder:
        options = MeasureOptions(answers=not args.no_answers, compress="context")
        files = DATA / "demo-model.gguf", DATA / "demo-mmproj.gguf"
        job = Job(*files, chosen(args, Path(folder)), cells(args), options, Settings(threads=args.threads))
        log(f"{len(job.cells)} plans on {len(job.samples)} samples")
        records = Records(args.save, job.header(), args.save is not None and args.save.exists())
        out = evaluate(job, records, Steps(enabled=sys.stderr.isatty()))
        for line in out.left_out[:5]:
            log(line)
        if out.interrupted:
            sys.exit(130)
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for row in records.rows.values():
            found.setdefault(row["method"], {})[row["id"]] = row
        return found


def figures(args: argparse.Namespace, found: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns a row for each method, size and type: KL, the difference to BASE with its interval, right answers."""
    names = {f"{method} {name} at {budget:g}" for method, budget, name in product(args.method, args.budget, args.type)}
    ids = sorted(set.intersection(*(set(found.get(name, {})) for name in names)))
    out = []
    for method, budget, name in product(args.method, args.budget, args.type):
        here, base = found[f"{method} {name} at {budget:g}"], found[f"{method} {BASE} at {budget:g}"]
        nats, of_base, tokens = (
            np.array([rows[one][key] for one in ids], np.float64)
            for rows, key in ((here, "kld"), (base, "kld"), (base, "tokens"))
        )
        row: dict[str, Any] = {"method": method, "budget": budget, "type": name, "samples": len(ids)}
        row |= {"bits": TYPES[name][1](args.size), "kl": nats.sum() / tokens.sum()}
        row["pairs"] = float(np.mean([here[one]["kept"] for one in ids]))
        row["interval"] = None if name == BASE else paired_interval(nats, tokens, of_base)
        if not args.no_answers:
            row["right"] = 100 * float(np.mean([here[one]["score"] for one in ids]))
        out.append(row)
    return out


def show(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Prints a table: a row for each method and budget, a column for each type."""
    lines = [["method", f"budget of {BASE}", *(f"{name}, {TYPES[name][1](args.size):g} bits" for name in args.type)]]
    for method, budget in product(args.method, args.budget):
        line = [f"`{method}`", f"{budget:g}"]
        for row in rows:
            if (row["method"], row["budget"]) == (method, budget):
                cell = f"{row['kl']:.4f}"
                cell += " ({:+.4f} to {:+.4f})".format(*row["interval"]) if row["interval"] else ""
                line.append(cell + (f"; {row['right']:.1f}" if "right" in row else ""))
        lines.append(line)
    print(f"{rows[0]['samples']} samples; KL, interval of the difference, and percent of right answers\n")
    print(markdown(lines))
    if ERRORS:
        sums = {name: ERRORS[name] for name in args.type if name in ERRORS}
        print("\nrelative squared error of the rows kept\n")
        print(markdown([["type", "keys", "values"],
                        *[[name, f"{a / b:.2e}", f"{c / d:.2e}"] for name, (a, b, c, d) in sums.items()]]))  # fmt: skip


def listed(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--samples", type=int, default=25, help="of each task (default %(default)s)")
    add("--tasks", default=TASKS, help="of the demo generator (default %(default)s)")
    add("--images", type=int, default=4, help="of the tasks with several (default %(default)s)")
    add("--texture", type=int, default=0, help="of the pictures, as experiments/measure_pruners.py has it; 0: plain")
    add("--method", type=listed, default=listed(METHODS), help=f"default {METHODS}")
    add("--budget", type=lambda text: [float(x) for x in listed(text)], default=[0.3, 0.15, 0.075],
        help=f"of {BASE}, ratios of the context (default 0.3,0.15,0.075)")  # fmt: skip
    add("--type", type=listed, default=list(TYPES), help=f"beside {BASE} (default {','.join(TYPES)})")
    add("--no-answers", action="store_true", help="of the reference answers alone, which is quicker")
    add("--seed", type=int, default=11)
    add("--threads", type=int, default=os.cpu_count() or 1)
    add("--save", type=Path, metavar="FILE.jsonl", help="keep every measurement, and go on from there")
    add("--json", action="store_true", help="print JSON instead of Markdown tables")
    args = parser.parse_args()
    unknown = set(args.type) - set(TYPES)
    if unknown:
        parser.error(f"no type of the trial is called {', '.join(sorted(unknown))}; they are {', '.join(TYPES)}")
    args.type, args.size = list(dict.fromkeys([BASE, *args.type])), HEAD_SIZE
    register()
    rows = figures(args, measured(args))
    print(json.dumps(rows, indent=1)) if args.json else show(args, rows)


if __name__ == "__main__":
    try:
        main()
    except KvedgeError as error:
        sys.exit(f"error: {error}")
