"""Rows of the papers' tables that are not methods of kvedge by name: compositions of built-in stages.

kvedge methods --plugin docs/results/tables.py lists them; papers.md says what they stand for.
"""

import pykvedge

# PrefixKV's tables 1, 2 and 4: importance per layer, the first and the last token protected, and generated tokens
# count: the cache keeps its share of all tokens so far
LAYERWISE = {"scorer": "cumulative", "scorer.share": "layer", "sinks": 1, "recent": 1, "decode": "ratio"}
pykvedge.preset("prefixkv-profile", allocator="prefix", **{"allocator.source": "profile"}, **LAYERWISE)
pykvedge.preset("layerwise-uniform", **LAYERWISE)
pykvedge.preset("layerwise-pyramid", allocator="pyramid", **LAYERWISE)
pykvedge.preset("h2o-constant", scorer="cumulative", decode="heavy-hitter")
pykvedge.preset("local", scorer="position", sinks=1, decode="sliding")

# the same, one change at a time: nothing generated is dropped, and the end of the prompt, which asks, is protected
KEEPING = {**LAYERWISE, "decode": "keep-all"}
ASKING = {**LAYERWISE, "recent": 17}
BOTH = {**KEEPING, "recent": 17}
for name, changed in (("keeping", KEEPING), ("asking", ASKING), ("asking-keeping", BOTH)):
    pykvedge.preset(f"prefixkv-{name}", allocator="prefix", **changed)
    pykvedge.preset(f"layerwise-uniform-{name}", **changed)

# LOOK-M's table 1, of which h2o and lookm are two rows: text prior or not (TP), and how evicted pairs are merged
for reducer in ("averaged", "weighted", "pivotal"):
    pykvedge.preset(f"h2o-{reducer}", scorer="cumulative", reducer=reducer)
for reducer in ("evict", "averaged", "weighted"):
    pykvedge.preset(f"lookm-{reducer}", scorer="cumulative", reducer=reducer, text_prior=True)
