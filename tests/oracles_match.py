"""Attention Matching in plain loops, written only from the paper (Zweiger et al. 2026, section 3)."""

import math


def logits_of(queries, keys, biases):
    """Returns one row of logits per query, one logit per key. The queries are already scaled."""
    return [
        [sum(a * c for a, c in zip(q, k, strict=True)) + b for k, b in zip(keys, biases, strict=True)] for q in queries
    ]


def attention(logits):
    out = []
    for row in logits:
        top = max(row)
        weights = [math.exp(z - top) for z in row]
        out.append([w / sum(weights) for w in weights])
    return out


def masses(logits, kept, relative=False):
    """Returns (M, y): each query's weights of the kept rows, and of all rows. Scale: largest weight 1, or y = 1."""
    m, y = [], []
    for row in logits:
        top = max(row)
        weights = [math.exp(z - top) for z in row]
        total = sum(weights)
        m.append([weights[j] / (total if relative else 1.0) for j in kept])
        y.append(1.0 if relative else total)
    return m, y


LOW, HIGH = math.exp(-3), math.exp(3)


def box_descent(m, y):
    """Coordinate descent for argmin |M w - y| in the box. Starts from the best common weight.

    Sets one weight after the other to its best: 20 rounds, or until no weight moves by more than a thousandth.
    """
    n = len(m[0])
    sums = [sum(row) for row in m]
    same = sum(s * z for s, z in zip(sums, y, strict=True)) / sum(s * s for s in sums)
    w = [min(HIGH, max(LOW, same))] * n
    left = [z - w[0] * s for s, z in zip(sums, y, strict=True)]  # y - M w
    for _ in range(20):
        moved = 0.0
        for j in range(n):
            own = sum(row[j] ** 2 for row in m)
            along = sum(row[j] * r for row, r in zip(m, left, strict=True))
            best = min(HIGH, max(LOW, w[j] + along / own)) if own > 0 else LOW
            step = best - w[j]
            if step:
                left = [r - step * row[j] for row, r in zip(m, left, strict=True)]
                w[j] = best
            moved = max(moved, abs(step) / best)
        if moved <= 1e-3:
            break
    return w


def median_weight(m, y):
    ratios = sorted(z / max(sum(row), 1e-30) for row, z in zip(m, y, strict=True))
    n = len(ratios)
    middle = ratios[n // 2] if n % 2 else (ratios[n // 2 - 1] + ratios[n // 2]) / 2
    return min(HIGH, max(LOW, middle))


def solved(a, b):
    """Returns x with a x = b (lists of rows), by Gaussian elimination with the largest pivot."""
    n = len(a)
    rows = [list(left) + list(right) for left, right in zip(a, b, strict=True)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, n):
            factor = rows[r][i] / rows[i][i]
            if factor:
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[i], strict=True)]
    for i in range(n - 1, -1, -1):
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for r in range(i):
            factor = rows[r][i]
            rows[r] = [x - factor * y for x, y in zip(rows[r], rows[i], strict=True)]
    return [row[n:] for row in rows]


def largest_square(x):
    """Returns |X|_2^2, the largest eigenvalue of X'X, by 1,000 steps of the power method."""
    n = len(x[0])
    v, size = [1.0] * n, 0.0
    for _ in range(1000):
        u = [sum(a * b for a, b in zip(row, v, strict=True)) for row in x]
        v = [sum(row[j] * a for row, a in zip(x, u, strict=True)) for j in range(n)]
        size = math.sqrt(sum(a * a for a in v))
        v = [a / size for a in v]
    return size


def ridge_values(x, outputs, own, ridge):
    """Returns argmin |X C - Y|^2 + ridge |X|_2^2 |C - V|^2, from the normal equations."""
    n, penalty = len(x[0]), ridge * largest_square(x)
    gram = [[sum(row[i] * row[j] for row in x) + (penalty if i == j else 0.0) for j in range(n)] for i in range(n)]
    right = [
        [
            sum(row[i] * o[c] for row, o in zip(x, outputs, strict=True)) + penalty * own[i][c]
            for c in range(len(outputs[0]))
        ]
        for i in range(n)
    ]
    return solved(gram, right)


def match(queries, keys, values, kept, settings, before=None):
    """Returns (values, ln of the weights) of the kept rows, fitted to all rows. before: earlier biases of all rows."""
    bias, ridge = settings["bias"], settings["ridge"]
    logits = logits_of(queries, keys, before or [0.0] * len(keys))
    m, y = masses(logits, kept, settings["mass"] == "relative")
    one = median_weight(m, y) if bias == "head" else 1.0
    w = box_descent(m, y) if bias == "row" else [one] * len(kept)
    outputs = [
        [sum(a * v[c] for a, v in zip(row, values, strict=True)) for c in range(len(values[0]))]
        for row in attention(logits)
    ]
    x = attention([[row[j] + math.log(a) for j, a in zip(kept, w, strict=True)] for row in logits])
    return ridge_values(x, outputs, [values[j] for j in kept], ridge), [math.log(a) for a in w]
