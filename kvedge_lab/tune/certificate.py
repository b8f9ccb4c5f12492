"""The evidence of a run: as a certificate (JSON), as a page with a plot, and as a row in a table of models."""

from __future__ import annotations

import datetime
import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from kvedge_lab.drawing import can_draw, canvas, caption, legend, style
from kvedge_lab.eval.measure import Cell
from kvedge_lab.eval.runner import FULL
from kvedge_lab.tune import choice
from kvedge_lab.tune.figures import INTERVALS, Figures, telling
from kvedge_lab.tune.race import Race
from pykvedge.cli.tables import markdown
from pykvedge.errors import SaveError
from pykvedge.models import profiles, tuned
from pykvedge.plans.making import plan
from pykvedge.plans.plan import Plan
from pykvedge.system.files import write_whole
from pykvedge.system.version import package_version

LEAST_PROOF = 8  # contexts
HEAD = ("bytes", "agreement", "exact answers", "KL, nats a token", "contexts")


@dataclass(frozen=True)
class Verdict:
    """A run's decision. taken: None if nothing is promised. why: the reason, or that no plan reaches the target."""

    taken: Cell | None
    proof: Figures | None
    why: str = ""


def verdict(race: Race) -> Verdict:
    """Decides which plan is taken, by the contexts that were not used to choose."""
    if problem := race.problem():
        return Verdict(None, None, problem)
    proof = race.figures(race.proving, race.finalists, len(race.finalists))
    seen = _seen(proof)
    if seen < LEAST_PROOF:
        return Verdict(None, None, f"{seen} contexts are too few for an interval, which needs {LEAST_PROOF}; "
                       "give more --minutes" + (" or more pictures" if race.material.size else ""))  # fmt: skip
    found = choice.taken(race.finalists, proof, race.target, race.default)
    if found is not None:
        return Verdict(found, proof[found.key])
    best = choice.nearest(proof)
    near = f"; the nearest is {best.method} at {best.budget} with {_share(asdict(best))}" if best else ""
    why = f"no plan was proven to keep {100 * race.target:g} % agreement{near}"
    return Verdict(Cell(FULL, plan(FULL)), best, why + "; more --minutes make the intervals narrower")


def made(race: Race, cell: Cell, proof: Figures, why: str, command: str) -> dict[str, Any]:
    """Makes the certificate of a taken plan. why: as in Verdict."""
    model = race.loan.model
    first, second = race.figures(race.choosing), race.figures(race.proving, race.finalists, len(race.finalists))
    return {
        "kvedge_tuned": tuned.JSON_VERSION,
        "model": {"hash": profiles.hash_of(model.path), "name": model.path.name,
                  "architecture": model.header.architecture},
        "plan": json.loads(cell.plan.to_json()),
        "settings": cell.plan.as_text(),
        "profiles": tuned.digests(cell.plan, model.path),
        "target": race.target,
        "met": not why,
        "why": why,
        "proof": asdict(proof),
        "finalists": [asdict(one) for one in second.values()],
        "level": choice.level(len(race.finalists)),
        "choosing": [asdict(one) for one in first.values()],
        "contexts": {"choosing": _seen(first), "proving": _seen(second), "source": race.material.source},
        "telling": telling(race.kept.rows, race.contexts),
        "left_out": len(race.left_out),
        "kv_type": race.settings.storage.key,
        "made": {"command": command, "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
                 "seconds": round(race.kept.spent()), "kvedge": package_version(), "interval": INTERVALS},
    }  # fmt: skip


def save(says: dict[str, Any]) -> Path:
    """Writes a certificate to its place. Raises SaveError."""
    path = tuned.place(says["model"]["hash"])
    write(path, json.dumps(says, indent=1) + "\n")
    return path


def write(path: Path, text: str) -> None:
    """Writes the whole file or nothing. Raises SaveError."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise SaveError(f"{path} cannot be written: {error.strerror or error}") from None


def table(says: dict[str, Any]) -> str:
    """Returns the evidence as Markdown: finalists on the proving half, then all plans on the choosing half."""
    parts = (sorted(says[part], key=itemgetter("bytes")) for part in ("finalists", "choosing"))
    proof, every = ([["plan", *HEAD], *([f"`{x['method']}` {x['budget']}", *_row(x)] for x in part)] for part in parts)
    level = f"{100 * says['level']:.1f} %"
    return (f"Proof, on contexts that did not choose (intervals of {level} each, 95 % together):\n\n{markdown(proof)}\n"
            f"\nAll plans, on the contexts that chose (95 % each):\n\n{markdown(every)}")  # fmt: skip


def summary(says: dict[str, Any]) -> str:
    """Returns a few lines: what was chosen, from what, and how it was measured."""
    contexts = says["contexts"]
    line = tuned.of(says, Path("the certificate")).line()
    return (f"{says['model']['name']}: {line}\n{contexts['choosing']} contexts to choose, {contexts['proving']} others "
        f"to prove ({contexts['source']}); {says['made']['date']}, kvedge {says['made']['kvedge']}")  # fmt: skip


def models(found: Sequence[Mapping[str, Any]]) -> str:
    """Returns a Markdown table of certificates, one model per line."""
    rows = [["model", "plan", *HEAD, "pictures", "kvedge"]]
    for says in sorted(found, key=lambda says: says["model"]["name"]):
        one = says["proof"]
        method = Plan.from_json(json.dumps(says["plan"])).method
        name = f"`{method}` {one['budget']}" if says["met"] else f"`full`; nearest `{one['method']}` {one['budget']}"
        model = f"{says['model']['name']} ({says['model']['architecture']})"
        rows.append([model, name, *_row(one), says["contexts"]["source"], says["made"]["kvedge"]])
    return markdown(rows)


def page(says: dict[str, Any]) -> str:
    """Returns a self-contained HTML page: the plot, if matplotlib is installed, and the table."""
    name, (finalists, every) = html.escape(says["model"]["name"]), table(says).split("\n\nAll plans")
    text = "\n".join(f"<p>{html.escape(line)}</p>" for line in summary(says).splitlines())
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>kvedge tune: {name}</title>
<style>body{{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}}pre{{overflow:auto}}
svg{{max-width:100%;height:auto}}</style>
<h1>{name}</h1>
{text}
{_plot(says)}
<p>{html.escape(INTERVALS)}</p>
<pre>{html.escape(finalists)}</pre>
<pre>All plans{html.escape(every)}</pre>
<details><summary>Certificate</summary><pre>{html.escape(json.dumps(says, indent=1))}</pre></details></html>
"""


def _plot(says: dict[str, Any]) -> str:
    """Returns a plot of agreement against bytes, one line per method, as inline SVG; a hint without matplotlib."""
    if not can_draw():
        return "<p>The plot needs matplotlib: pip install 'kvedge[plot]'</p>"
    to = io.BytesIO()
    with canvas(to, 1, 1, size=(6.6, 4.2), form="svg") as [[axis]]:
        falling = sorted(says["choosing"], key=lambda one: -one["agreement"])
        lowest = {one["budget"]: one["agreement"] for one in falling}
        for name in dict.fromkeys(one["method"] for one in says["choosing"]):
            points = sorted((one for one in says["choosing"] if one["method"] == name), key=lambda one: one["bytes"])
            at, share = [100 * p["bytes"] for p in points], [100 * p["agreement"] for p in points]
            axis.plot(at, share, label=name, **style(name))
            for x, y, point in zip(at, share, points, strict=True):
                between = [100 * point["low"], 100 * point["high"]]
                axis.plot([x, x], between, color=style(name)["color"], linewidth=0.6, alpha=0.6)
                if point["agreement"] == lowest[point["budget"]]:  # other labels would overlap
                    axis.annotate(f"{point['budget']}", (x, y), xytext=(4, -9), textcoords="offset points")
        for one in says["finalists"]:
            x, y, low, high = (100 * one[name] for name in ("bytes", "agreement", "low", "high"))
            axis.errorbar(
                [x], [y], [[y - low], [high - y]], fmt="*", color="black", markersize=8, capsize=3, linewidth=1
            )
        axis.axhline(100 * says["target"], color="#80868b", linestyle="--", linewidth=1)
        axis.set_xlabel("keys and values after the prompt, % of the full cache's bytes")
        axis.set_ylabel("agreement with the full cache, % of tokens")
        axis.grid()
        legend(axis.figure, [axis], columns=6)
        caption(axis.figure, "Dashed: target. Stars: proof on contexts that did not choose. Bars: 95 % intervals.")
    text = to.getvalue().decode()
    return text[text.index("<svg") :]


def _share(one: Mapping[str, Any], name: str = "") -> str:
    share = one[name or "agreement"]
    low, high = one[f"{name}_interval"] if name else (one["low"], one["high"])
    return f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _row(one: Mapping[str, Any]) -> list[str]:
    between = one["kld_interval"]
    nats = f"{one['kld']:.4f}" + (f" ({between[0]:.4f} to {between[1]:.4f})" if between else "")
    return [f"{100 * one['bytes']:.0f} %", _share(one), _share(one, "exact"), nats, str(one["contexts"])]


def _seen(found: choice.Found) -> int:
    return max((one.contexts for one in found.values()), default=0)
