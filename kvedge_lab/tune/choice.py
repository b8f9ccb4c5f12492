"""Chooses plans: which plans stay in the race, which plans are proved, and which plan is taken.

The more plans are compared, the more luck the best plan has. Contexts are therefore in two halves. On the first half
plans drop out, and up to FINALISTS remain. On the second half the finalists are measured, with intervals that hold for
all of them at once (each at 1 - 0.05 / finalists), so the taken plan's interval holds although the plan was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvedge_lab.eval.measure import Cell
from kvedge_lab.eval.metrics import SHARE
from kvedge_lab.tune.figures import Figures

FINALISTS = 3  # at most, with the default plan
Found = Mapping[tuple[str, str], Figures]


def level(n: int) -> float:
    """Returns the level of each of n intervals that hold together in 95 of 100 runs."""
    return 1 - (1 - SHARE) / max(n, 1)


def survivors(cells: Sequence[Cell], found: Found, target: float, default: Cell) -> list[Cell]:
    """Returns the better half of the plans, in their order; the default plan and FINALISTS other plans always stay.

    The order alternates between plans that reach the target, cheapest first, and plans that come nearest to it.
    """
    known = [cell for cell in cells if cell.key in found]
    reach = sorted((c for c in known if found[c.key].agreement >= target), key=lambda c: found[c.key].bytes)
    near = sorted((c for c in known if found[c.key].agreement < target), key=lambda c: -found[c.key].agreement)
    near = [c for c in near if found[c.key].high >= target] or near[:1]
    order = [cell for i in range(len(known)) for of in (reach, near) for cell in of[i : i + 1]]
    kept = {cell.key for cell in order[: max(math.ceil(len(known) / 2), FINALISTS)]} | {default.key}
    return [cell for cell in cells if cell.key in kept]


def finalists(cells: Sequence[Cell], found: Found, target: float, default: Cell) -> list[Cell]:
    """Returns the cheapest plan whose interval reaches the target, a safer plan, and the default plan.

    If no plan reaches it, the nearest plans. No plan is worse than the default plan in both bytes and agreement.
    """
    known = [cell for cell in cells if cell.key in found and cell.key != default.key]
    known = [cell for cell in known if not _worse(found[cell.key], found.get(default.key))]
    by_bytes = sorted(known, key=lambda c: (found[c.key].bytes, -found[c.key].agreement))
    first = next((c for c in by_bytes if found[c.key].low >= target), None)
    first = first or max(by_bytes, key=lambda c: found[c.key].low, default=None)
    if first is None:
        return [default]
    base = found[first.key]
    safer = next((c for c in by_bytes if found[c.key].low > base.low), None)
    return [first, *([safer] if safer else []), default]


def taken(cells: Sequence[Cell], found: Found, target: float, default: Cell) -> Cell | None:
    """Returns the plan of the fewest bytes whose interval reaches the target, or None."""
    fitting = [c for c in cells if c.key in found and found[c.key].low >= target]
    fitting = [c for c in fitting if not _worse(found[c.key], found.get(default.key))]
    return min(fitting, key=lambda c: found[c.key].bytes, default=None)


def nearest(found: Found) -> Figures | None:
    """Returns the plan that keeps the most agreement, for the case that no plan reaches the target."""
    return max(found.values(), key=lambda one: (one.low, -one.bytes), default=None)


def _worse(one: Figures, default: Figures | None) -> bool:
    if default is None or one.key == default.key:
        return False
    return one.bytes >= default.bytes and one.agreement <= default.agreement
