"""Second implementations of the papers' equations, in loops over single numbers, without code of the package."""

import cmath
import math


def column_sums(q, k):
    """Returns the attention that each token receives. q, k: T vectors of one query head and of its KV head."""
    size = len(k[0])
    total = [0.0] * len(k)
    for m, query in enumerate(q):
        logits = [sum(a * b for a, b in zip(query, k[n], strict=True)) / math.sqrt(size) for n in range(m + 1)]
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        for n, w in enumerate(weights):
            total[n] += w / sum(weights)
    return total


def budget(n_tokens, ratio):
    """Returns floor(n_tokens * ratio), at least 1, in exact decimals."""
    from fractions import Fraction

    return max(1, math.floor(n_tokens * Fraction(str(ratio))))


def heavy_hitters(scores, n, recent):
    """H2O: keeps the last `recent` tokens, then the tokens with the largest scores."""
    n_tokens = len(scores)
    window = set(range(n_tokens - recent, n_tokens))
    rest = sorted((-scores[i], i) for i in range(n_tokens - recent))
    return sorted(window | {i for _, i in rest[: n - recent]})


def protected_window(window, n, even, parts=2):
    """Returns the longest window of at most 1 / `parts` of an even share, or of n where n is a small share."""
    share = min(n, even) if n < min(window, even // parts) else even
    recent = 0
    while recent < window and parts * (recent + 1) <= share:
        recent += 1
    return recent


def text_prior(scores, image, n, recent):
    """LOOK-M, eq. 5 and 8: adds the head's largest score to every text token, then selects as H2O."""
    top = max(scores)
    return heavy_hitters([s if i else s + top for s, i in zip(scores, image, strict=True)], n, recent)


def streaming(n_tokens, n, sinks):
    """StreamingLLM: keeps the first and the last tokens."""
    sinks = min(sinks, n)
    return sorted({*range(sinks), *range(n_tokens - (n - sinks), n_tokens)})


def _cosine(a, b):
    norms = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else -math.inf


def nearest_by_key(k, kept):
    """LOOK-M, eq. 9: returns {kept token: [(evicted token, similarity)]}, by the most similar key."""
    evicted = [i for i in range(len(k)) if i not in set(kept)]
    groups = {j: [] for j in kept}
    for i in evicted:
        similarity = [_cosine(k[i], k[j]) for j in kept]
        best = max(similarity)
        if best > -math.inf:
            j = kept[similarity.index(best)]
            groups[j].append((i, best))
    return groups


def nearest_within(k, kept, reach):
    """For each kept token, the evicted tokens whose nearest key it is, within reach; a similarity of 1."""
    groups = {j: [] for j in kept}
    for i in sorted({*range(len(k))} - {*kept}):
        distance, j = min((math.dist(k[i], k[j]), j) for j in kept)
        if distance <= reach * math.hypot(*k[i]):
            groups[j].append((i, 1.0))
    return groups


def nearest_by_place(n_tokens, kept, anchors):
    """Elastic Cache, eq. 2: evicted tokens by nearest anchor, ties to the left; a similarity of 1."""
    groups = {j: [] for j in kept}
    for i in sorted({*range(n_tokens)} - {*kept}):
        if anchors:
            groups[min(anchors, key=lambda j: (abs(i - j), j))].append((i, 1.0))
    return groups


def merge_copies(rows, groups, copies, kind):
    """LOOK-M, eq. 10 to 12, for rows with several copies, copy after copy. Returns [kept][d]."""
    out = []
    for j, members in groups.items():
        total, n = [0.0] * len(rows[j]), 0
        for i, w in [(j, None), *members]:
            for _ in range(copies[i]):
                n += 1
                for c, pivot in enumerate(rows[j]):
                    x = rows[i][c]
                    total[c] += x if i == j else {"averaged": x, "pivotal": (x + pivot) / 2, "weighted": w * x}[kind]
        out.append([x / n for x in total])
    return out


def merge(k, v, kept, kind):
    """LOOK-M, eq. 9 to 12, one evicted token after the other. Returns rows of keys, rows of values."""
    groups, out_k, out_v = nearest_by_key(k, kept), [], []
    for j in kept:
        for rows, out in ((k, out_k), (v, out_v)):
            total = list(rows[j])
            for i, w in groups[j]:
                for c in range(len(total)):
                    x, pivot = rows[i][c], rows[j][c]
                    total[c] += {"averaged": x, "pivotal": (x + pivot) / 2, "weighted": w * x}[kind]
            out.append([x / (len(groups[j]) + 1) for x in total])
    return out_k, out_v


def mean(x):
    """Returns the arithmetic mean."""
    return sum(x) / len(x)


def window_attention(q, k, window):
    """SnapKV: returns the mean attention of the last `window` queries of one head to every token."""
    n_tokens, size = len(k), len(k[0])
    rows = range(max(0, n_tokens - window), n_tokens)
    total = [0.0] * n_tokens
    for m in rows:
        logits = [sum(a * b for a, b in zip(q[m], k[n], strict=True)) / math.sqrt(size) for n in range(m + 1)]
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        for n, w in enumerate(weights):
            total[n] += w / sum(weights)
    return [x / len(rows) for x in total]


def pooled(x, kernel, kind):
    """Pools every number with its neighbours: the maximum, or their sum divided by the kernel's width."""
    half, out = kernel // 2, []
    for i in range(len(x)):
        near = [x[j] for j in range(i - half, i + half + 1) if 0 <= j < len(x)]
        out.append(max(near) if kind == "max" else sum(near) / kernel)
    return out


def minmax01(x):
    """Scales to [0, 1]: the smallest is 0, the largest is 1. All are 0 if equal up to a millionth."""
    low, high = min(x), max(x)
    return [(a - low) / (high - low + 1e-8) if high - low > 1e-6 * max(-low, high) else 0.0 for a in x]


def scaled(x, to):
    """Returns x, given in [0, 1], with the mean of `to`."""
    return [a * mean(to) / (mean(x) + 1e-8) for a in x]


def redundancy(k):
    """MixKV, eq. 4: returns the mean cosine similarity of all pairs of different keys, at least 0."""
    pairs = [(i, j) for i in range(len(k)) for j in range(len(k)) if i != j]
    return max(0.0, mean([_cosine(k[i], k[j]) for i, j in pairs])) if pairs else 0.0


def mixkv(q, k, v, settings):
    """MixKV, section 3.3. q: a list of query heads; k, v: rows of their KV head. No key has the norm 0."""
    window, n = settings["window"], max(0, len(k) - settings["window"])
    attention = [mean(x) for x in zip(*(window_attention(head, k, window) for head in q), strict=True)]
    if not n:
        return attention
    s_ex = pooled(attention[:n], settings["kernel"], settings["pool"])
    rows, sign = (k, -1) if settings["value"] == "knorm" else (v, 1)
    s_in = scaled(minmax01([sign * math.sqrt(sum(c * c for c in row)) for row in rows[:n]]), s_ex)
    s_imp = [a + b for a, b in zip(s_ex, s_in, strict=True)]
    away = [-mean([_cosine(k[i], k[j]) for j in range(len(k))]) for i in range(n)]
    s_div = scaled(minmax01(away), s_ex if settings["scale"] == "ex" else s_imp)
    r = {"headwise": redundancy(k), "importance": 0, "diversity": 1, "even": 0.5}[settings["mode"]]
    return [(1 - r) * a + r * b for a, b in zip(s_imp, s_div, strict=True)] + attention[n:]


def keydiff(k, of_units=True):
    """KeyDiff, section 3: returns minus the cosine of each key and the mean of all keys. No key has the norm 0."""
    rows = [[c / math.sqrt(sum(x * x for x in row)) for c in row] for row in k] if of_units else k
    anchor = [mean(channel) for channel in zip(*rows, strict=True)]
    return [-_cosine(row, anchor) for row in k]


def _turned(row, turns, neox):
    """Multiplies pairs of channels by the complex numbers turns [n]; further channels stay unchanged."""
    out, n = list(row), len(turns)
    for i, w in enumerate(turns):
        a, b = (i, i + n) if neox else (2 * i, 2 * i + 1)
        z = complex(row[a], row[b]) * w
        out[a], out[b] = z.real, z.imag
    return out


def expected_attention(q, k, v, turning, settings):
    """Expected Attention, section 3: scores the tokens after the sinks. q: heads of a group; k, v: of their KV head.

    turning: (angles, whether pairs are those of NEOX). Token t has position t.
    """
    (angles, neox), first, size = turning, settings["n_sink"], len(k[0])
    ahead = range(len(k), len(k) + settings["n_future"])
    future = [mean([cmath.exp(1j * p * a) for p in ahead]) for a in angles]
    shares = [0.0] * (len(k) - first)
    for head in q:
        rows = [_turned(head[t], [cmath.exp(-1j * t * a) for a in angles], neox) for t in range(first, len(k))]
        center = [mean(channel) for channel in zip(*rows, strict=True)]
        logits = []
        for t in range(first, len(k)):
            # R' k instead of R mu and R S R': the product is the same
            key = _turned(k[t], [w.conjugate() for w in future], neox)
            logit = sum(a * b for a, b in zip(center, key, strict=True)) / math.sqrt(size)
            along = [sum((x - c) * y for x, c, y in zip(row, center, key, strict=True)) for row in rows]
            logits.append(logit + settings["covariance"] * mean([a * a for a in along]) / (2 * size))
        total = sum(math.exp(x) for x in logits)
        shares = [s + math.exp(x) / total / len(q) for s, x in zip(shares, logits, strict=True)]
    if not settings["vnorm"]:
        return shares
    lengths = [math.sqrt(sum(c * c for c in row)) for row in v[first:]]
    return [(s + settings["eps"]) * n for s, n in zip(shares, lengths, strict=True)]


def dct(x):
    """FlashCache, eq. 6: the orthonormal DCT-II of a list of T numbers."""
    n = len(x)
    scale = [math.sqrt((1 if m == 0 else 2) / n) for m in range(n)]
    return [scale[m] * sum(x[i] * math.cos(math.pi / n * m * (i + 0.5)) for i in range(n)) for m in range(n)]


def low_pass(x, w):
    """Returns the inverse transform of the first w bins."""
    n, bins = len(x), dct(x)
    scale = [math.sqrt((1 if m == 0 else 2) / n) for m in range(n)]
    return [sum(scale[m] * bins[m] * math.cos(math.pi / n * m * (i + 0.5)) for m in range(w)) for i in range(n)]


def deviation(k, v, w):
    """FlashCache, eq. 10, for one KV head: the squared distance of each token from the base, per channel."""
    out = [0.0] * len(k)
    for rows in (k, v):
        for channel in zip(*rows, strict=True):
            for i, (x, base) in enumerate(zip(channel, low_pass(channel, w), strict=True)):
                out[i] += (x - base) ** 2 / len(rows[0])
    return out


def high_energy(heads, w):
    """FlashCache, eq. 11 and 12: the share of the energy in the bins from w on. heads: [Hkv][T][d]."""
    bins = [dct(channel) for rows in heads for channel in zip(*rows, strict=True)]
    return sum(c * c for b in bins for c in b[w:]) / sum(c * c for b in bins for c in b)


def merge_nearest(rows, kept, anchors):
    """Elastic Cache, eq. 2 and 3: the mean of every anchor with its nearest evicted tokens; ties go to the left."""
    groups = {j: [j] for j in kept}
    for i in range(len(rows)):
        if i not in groups and anchors:
            groups[min(anchors, key=lambda j: (abs(i - j), j))].append(i)
    return [[mean([rows[i][c] for i in groups[j]]) for c in range(len(rows[0]))] for j in kept]


def attention_rows(q, k):
    """Returns the rows of one query head's causal attention matrix. Row m has m + 1 weights."""
    size, rows = len(k[0]), []
    for m, query in enumerate(q):
        logits = [sum(a * b for a, b in zip(query, k[n], strict=True)) / math.sqrt(size) for n in range(m + 1)]
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        rows.append([w / sum(weights) for w in weights])
    return rows


def mean_and_deviation(q, k):
    """RoCo: the mean and the deviation of the attention to each token, over later queries. q: heads of a group."""
    heads = [attention_rows(head, k) for head in q]
    rows = [[mean(x) for x in zip(*same, strict=True)] for same in zip(*heads, strict=True)]
    out = []
    for n in range(len(k)):
        column = [row[n] for row in rows[n:]]
        out.append((mean(column), math.sqrt(mean([(x - mean(column)) ** 2 for x in column]))))
    return [m for m, _ in out], [d for _, d in out]


def robust(means, deviations, n, sinks=4, spread=0.3):
    """RoCo for a whole prompt: keeps the last tenth of n, sinks, the largest deviations, then the largest means."""
    n_tokens = len(means)
    recent = max(1, n // 10)
    kept = {*range(n_tokens - recent, n_tokens), *range(min(sinks, n - recent))}
    for scores, most in ((deviations, len(kept) + math.floor(n * spread + 1e-9)), (means, n)):
        rest = sorted((-scores[i], i) for i in range(n_tokens) if i not in kept)
        kept |= {i for _, i in rest[: min(most, n) - len(kept)]}
    return sorted(kept)


def _entropy(logits):
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    shares = [w / sum(weights) for w in weights]
    return -sum(a * math.log(a) for a in shares if a > 0)


def cross_entropy(q, k, image):
    """MEDA: mean entropy of attention from text to image tokens, plus from image to text. q, k: of one query head."""
    total = 0.0
    for side in (True, False):
        queries = [m for m, i in enumerate(image) if i != side]
        keys = [n for n, i in enumerate(image) if i == side]
        rows = [
            [sum(a * b for a, b in zip(q[m], k[n], strict=True)) / math.sqrt(len(k[0])) for n in keys] for m in queries
        ]
        total += mean([_entropy(row) for row in rows])
    return total


def largest_attention(q, k):
    """Returns the largest attention that any query of the prompt pays to each token. q: heads of a group."""
    out = [0.0] * len(k)
    for head in q:
        for i in range(len(k)):
            for t, share in enumerate(softmax_row(head[i], k[: i + 1])):
                out[t] = max(out[t], share)
    return out


def replayed(q, k, own, chunk, within):
    """KVzip, section 3.2: the largest attention that a query of one chunk's second pass pays to each token.

    q: the chunk's queries of a group's heads; own: their keys. chunk: (first, last, sinks). within: only the sinks, the
    chunk and the pass share the attention; all other tokens get 0.
    """
    first, last, sinks = chunk
    out = [0.0] * len(k)
    seen = [t for t in range(len(k)) if not within or first <= t < last or t < sinks]
    for head in q:
        for i, query in enumerate(head):
            shares = softmax_row(query, [k[t] for t in seen] + own[: i + 1])
            for t, share in zip(seen, shares, strict=False):
                if not within or first <= t < last:
                    out[t] = max(out[t], share)
    return out


def replayed_plus(q, k, v, own, chunk, within, weights):
    """KVzip+: multiplies attention of each query head by the norm of the value through weights [d_v][D].

    q, k, own, chunk, within: as in `replayed`. v: the values of the KV head.
    """
    out = [0.0] * len(k)
    for head, of_head in zip(q, weights, strict=True):
        paid = replayed([head], k, own, chunk, within)
        out = [max(a, b * projected(x, of_head, "l2")) for a, b, x in zip(out, paid, v, strict=True)]
    return out


def softmax_row(query, keys):
    """Returns the softmax over keys of their products with the query, divided by the root of its size."""
    logits = [sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(len(query)) for key in keys]
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


def projected(value, weights, norm):
    """CriticalKV: the norm (l1 or l2) of what a value [d_v] adds through weights [d_v][D]."""
    added = [sum(x * row[c] for x, row in zip(value, weights, strict=True)) for c in range(len(weights[0]))]
    return sum(abs(x) for x in added) if norm == "l1" else math.sqrt(sum(x * x for x in added))


def critical(scores, weights, n, protected, half="budget"):
    """CriticalKV, algorithm 1: chooses by score until half is full, then by (score + 1e-4) times weight.

    protected: tokens that are always kept. They count for half of the budget.
    """
    kept = set(protected)
    first = n // 2 if half == "budget" else len(kept) + (n - len(kept)) // 2
    while len(kept) < n:
        by = scores if len(kept) < first else [(s + 1e-4) * w for s, w in zip(scores, weights, strict=True)]
        kept.add(min((i for i in range(len(scores)) if i not in kept), key=lambda i: (-by[i], i)))
    return sorted(kept)


def least_error_of_levels(block, levels=(3, 9, 16, 26)):
    """Squared error of rounding sizes to the nearest of some levels times a scale; the best of 400 scales.

    TurboQuant (arXiv:2504.19874), equation 4, with a search for the scale.
    """
    sizes = [abs(float(x)) for x in block]
    top = max(sizes)
    least = math.inf
    for i in range(1, 401):
        scale = top * i / 400 / levels[0] / 2
        least = min(least, sum(min((x - scale * level) ** 2 for level in levels) for x in sizes))
    return least
