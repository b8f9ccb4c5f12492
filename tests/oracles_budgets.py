"""Second implementations for budgets of heads: exchanged shares and their counts, in loops over single numbers."""

import math
from fractions import Fraction


def shared(shares, total, most, least):
    """Divides the total in proportion to shares. No head gets more than `most`: the other heads share the rest. Then no
    head gets less than `least`: open heads pay, or the full heads when no head is open.
    """
    shares = [Fraction(x) for x in shares]
    full, short = set(), set()
    while True:
        open_ = [i for i in range(len(shares)) if i not in full | short]
        left, all_ = total - most * len(full) - least * len(short), sum(shares[i] for i in open_)
        real = {i: shares[i] * left / all_ if all_ else Fraction(left, len(open_)) for i in open_}
        over, under = {i for i, x in real.items() if x > most}, {i for i, x in real.items() if x < least}
        if not over | under:
            break
        full, short = full | over, short if over else short | under
    each = most if open_ or not full else Fraction(total - least * len(short), len(full))
    real |= dict.fromkeys(full, each) | dict.fromkeys(short, least)
    return [Fraction(real[i]) for i in range(len(shares))]


def calibrated(shares, total, most, least):
    """Returns counts of the heads: parts rounded down, and one more for the largest remainders."""
    real = shared(shares, total, most, least)
    counts = [math.floor(x) for x in real]
    by_rest = sorted(range(len(real)), key=lambda i: (counts[i] - real[i], i))
    for i in by_rest[: total - sum(counts)]:
        counts[i] += 1
    return counts


def poured(granted, more):
    """Returns the amounts after pouring in `more`: the lowest amounts rise together to the next higher amount."""
    out = [Fraction(x) for x in granted]
    more = Fraction(more)
    while more:
        lowest = min(out)
        low = [i for i, x in enumerate(out) if x == lowest]
        above = min((x for x in out if x > lowest), default=lowest + more)
        rise = min(more / len(low), above - lowest)
        for i in low:
            out[i] += rise
        more -= rise * len(low)
    return out


def exchanged(points, losses, targets, floor, per_even=50):
    """Moves single steps between heads until no head gains; returns the shares. An even share has per_even steps."""

    def at(curve, kept):
        if kept <= points[0]:
            return curve[0]
        for i in range(1, len(points)):
            if kept <= points[i]:
                part = (kept - points[i - 1]) / (points[i] - points[i - 1])
                return curve[i - 1] + (curve[i] - curve[i - 1]) * part
        return curve[-1]

    def cost(curve, steps):
        return sum(at(curve, target * steps / per_even) for target in targets) / len(targets)

    steps = [per_even for _ in losses]
    while True:
        gains = [cost(c, s) - cost(c, s + 1) for c, s in zip(losses, steps, strict=True)]
        to = gains.index(max(gains))
        givers = [i for i, s in enumerate(steps) if i != to and s - 1 >= floor * per_even - 1e-9]
        price = {i: cost(losses[i], steps[i] - 1) - cost(losses[i], steps[i]) for i in givers}
        giver = min(givers, key=lambda i: (price[i], i), default=None)
        if giver is None or gains[to] <= price[giver] + 1e-12:
            return [s / (per_even * len(losses)) for s in steps]
        steps[to] += 1
        steps[giver] -= 1
