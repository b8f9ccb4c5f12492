"""The command `kvedge methods` lists, explains and checks the methods."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import click

from pykvedge.cli import completion, options
from pykvedge.cli.command import command, option
from pykvedge.cli.tables import WIDTH
from pykvedge.errors import KvedgeError, UsageError
from pykvedge.plans import presets
from pykvedge.plans.making import plan
from pykvedge.plans.plan import CRITICAL, CRITICAL_HALF
from pykvedge.plans.plugins import installed
from pykvedge.plans.presets import PRESETS, Preset, preset
from pykvedge.plans.registry import STAGES, member, members


@command()
@click.argument("name", required=False, shell_complete=completion.methods)
@options.JSON
@options.PLUGIN
@option(
    "--check", "checking", is_flag=True,
    help="Check the rules of this method or stage on many prompts. Exit code 1: a rule is broken.",
)  # fmt: skip
def methods(name: str | None, as_json: bool, checking: bool, **given: Any) -> None:
    """List the compression methods, explain one, or check one.

    \b
    Examples:
      kvedge methods
      kvedge methods lookm
      kvedge methods lookm --json        the plan as JSON, for --plan
      kvedge methods --check mine --plugin mine.py
    """
    options.load_plugins(given)
    if checking:
        if name is None:
            raise UsageError("--check needs the name of a method or stage: kvedge methods --check NAME")
        sys.exit(_check(name, as_json))
    if name is not None:
        chosen = preset(name)
        click.echo(plan(chosen.name).to_json() if as_json else _explain(chosen))
    elif as_json:
        click.echo(json.dumps([_as_object(p) for p in _all()]))
    else:
        click.echo(_table(_all()))


def _all() -> list[Preset]:
    """Returns all methods. Prints plugins that fail to load and methods that cannot be made to stderr."""
    names, problems = presets.methods(), installed.problems()
    out = [PRESETS[name] for name in names if name in PRESETS]
    for found in (preset(name) for name in names if name not in PRESETS):
        try:
            plan(found.name)
            out.append(found)
        except (KvedgeError, TypeError) as error:
            problems.append(f"method '{found.name}' of a plugin: {error}")
    for problem in problems:
        click.echo(f"kvedge: warning: {' '.join(problem.split())}", err=True)
    return out


def _check(name: str, as_json: bool) -> int:
    """Prints the result of `pykvedge.reference.checks`. Returns the exit code."""
    from pykvedge.reference.checks.suite import check

    rows = check(name)
    broken = any(row.failed for row in rows)
    if as_json:
        click.echo(json.dumps({"name": name, "passed": not broken, "checks": [asdict(row) for row in rows]}))
        return int(broken)
    width = max(len(row.check) for row in rows)
    for row in rows:
        cases = f"{row.cases - row.failed:3d} of {row.cases:3d}" if row.cases else " " * 10
        click.echo(f"{row.check.ljust(width)}  {cases}  {row.status}{': ' + row.note if row.note else ''}")
    return int(broken)


def _as_object(p: Preset) -> dict[str, object]:
    made = plan(p.name)
    return {
        "name": p.name,
        "summary": p.summary,
        "reference": p.reference,
        "stages": {stage: getattr(made, stage) for stage in STAGES},
        "profiles": made.profile_kinds(),
        "defaults": json.loads(made.to_json()),
        "by_budget": [{"from": least, "params": dict(p.by_budget[least])} for least in sorted(p.by_budget)],
    }


def _table(chosen: Iterable[Preset]) -> str:
    rows = [
        ("method", "budget", "KV pairs that the method keeps"),
        *((p.name, str(plan(p.name).budget), p.summary) for p in chosen),
    ]
    names, budgets = (max(len(row[i]) for row in rows) for i in range(2))
    indent = " " * (names + budgets + 4)
    lines = [
        textwrap.fill(f"{name:{names}}  {budget:{budgets}}  {text}", WIDTH, subsequent_indent=indent)
        for name, budget, text in rows
    ]
    lines += ["", "`kvedge methods NAME` explains a method; options of `kvedge chat` change its parts."]
    return "\n".join(lines)


def _by_budget(p: Preset) -> str:
    """Returns a text with the preset's settings for each range of budgets, in ascending order."""
    levels = sorted(p.by_budget)
    names = dict.fromkeys(tuple(name.split(".")) for level in levels for name in p.by_budget[level])
    parts = []
    for which, budget in [(f"below {levels[0]:g}", levels[0] / 2), *((f"from {x:g} on", x) for x in levels)]:
        made = plan(p.name, budget)
        parts.append(f"{which} " + ", ".join(f"{s}.{name} = {made.settings(s)[name]}" for s, name in names))
    return "; ".join(parts)


def _explain(p: Preset) -> str:
    made = plan(p.name)
    lines = [f"{p.name}: {p.summary}", f"  from      {p.reference}"]
    for stage in STAGES:
        m = member(stage, getattr(made, stage))
        lines.append(f"  {stage:<9} {m.name}: {m.summary} ({m.source})")
        own = made.settings(stage)
        lines += [f"            {stage}.{s.name} = {own[s.name]}: {s.help}" for s in m.params]
    for stage, kind in made.profile_kinds().items():
        from pykvedge.plans.profile import KINDS

        lines.append(f"  profile   {kind} of the model for the {stage}, made by `{KINDS[kind]}` (--profile)")
    budget = "the whole prompt" if made.budget.ratio == 1.0 else f"{made.budget} of the prompt"
    lines.append(f"  budget    {budget} (--budget)")
    if p.by_budget:
        lines.append(f"            {_by_budget(p)}")
    share = made.asked_recent(1000, 100) if made.recent is None else None
    shown = str(made.recent) if share is None else f"auto: {share} of a budget of 100" if share else "auto: none"
    lines.append(f"  recent    {shown} (--recent)")
    lines.append(f"  sinks     {made.sinks} (--sinks)")
    prior = "yes, text is kept before image tokens" if made.text_prior else "no"
    lines.append(f"  text      {prior} (--text-prior / --no-text-prior)")
    half = f"{made.critical}, after the first half ({made.critical_half})" if made.critical != "none" else "none"
    lines.append(f"  critical  {half} (--critical {', '.join(CRITICAL)}; --critical-half {', '.join(CRITICAL_HALF)})")
    lines.append(
        f"  images    {made.image_tokens} of an image's tokens, pruner {made.pruner} (--image-tokens, --pruner)"
    )
    lines.append(f"  dropped   {made.reducer} (--reducer {', '.join(members('reducer'))})")
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent=" " * 12) for line in lines)
