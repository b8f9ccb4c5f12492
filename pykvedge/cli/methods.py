"""kvedge methods."""

from __future__ import annotations

import json
import textwrap

import click

from pykvedge.presets import PRESETS, Preset, plan, preset
from pykvedge.stages.registry import STAGES, member


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: of one method, its plan.")
def methods(name: str | None, as_json: bool) -> None:
    """List the compression methods, or explain one.

    \b
    Examples:
      kvedge methods
      kvedge methods lookm
      kvedge methods lookm --json            the plan, to keep or to change
    """
    if name is not None:
        chosen = preset(name)
        click.echo(plan(chosen.name).to_json() if as_json else _explain(chosen))
    elif as_json:
        click.echo(json.dumps([_as_object(p) for p in PRESETS.values()]))
    else:
        click.echo(_table())


def _as_object(p: Preset) -> dict[str, object]:
    made = plan(p.name)
    return {
        "name": p.name,
        "summary": p.summary,
        "reference": p.reference,
        "stages": {stage: getattr(made, stage) for stage in STAGES},
        "defaults": json.loads(made.to_json()),
    }


def _table() -> str:
    rows = [("method", "budget", "scorer", "reducer", "what it keeps")]
    for p in PRESETS.values():
        made = plan(p.name)
        rows.append((p.name, str(made.budget), made.scorer, made.reducer, p.summary))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
    lines += ["", "`kvedge methods NAME` explains one; every option of `kvedge chat` changes a part of it."]
    return "\n".join(lines)


def _explain(p: Preset) -> str:
    made = plan(p.name)
    lines = [f"{p.name}: {p.summary}", f"  from      {p.reference}"]
    for stage in STAGES:
        m = member(stage, getattr(made, stage))
        lines.append(f"  {stage:<9} {m.name}: {m.summary} ({m.source})")
        lines += [f"            {stage}.{s.name} = {s.default}: {s.help}" for s in m.params]
    budget = "the whole prompt" if made.budget.ratio == 1.0 else f"{made.budget} of the prompt"
    lines.append(f"  budget    {budget} (--budget)")
    share = made.asked_recent(1000, 100) if made.recent is None else None
    shown = str(made.recent) if share is None else f"auto: {share} of a budget of 100" if share else "auto: none"
    lines.append(f"  recent    {shown} (--recent)")
    lines.append(f"  sinks     {made.sinks} (--sinks)")
    prior = "yes, text outranks image tokens" if made.text_prior else "no"
    lines.append(f"  text      {prior} (--text-prior / --no-text-prior)")
    merge = "--merge averaged, pivotal, weighted or none"
    lines.append(f"  merge     {made.reducer if made.reducer != 'evict' else 'none'} ({merge})")
    return "\n".join(textwrap.fill(line, 110, subsequent_indent=" " * 12) for line in lines)
