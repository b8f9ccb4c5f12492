"""The named methods. Each method is a composition of stages, written as one entry of data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pykvedge.errors import UnknownNameError, UsageError, unknown
from pykvedge.plans.amounts import Budget
from pykvedge.plans.plugins import installed, table
from pykvedge.plans.plugins.table import Preset
from pykvedge.reference.stages.members import STAGES

# The method if the user names none. It loses least among all measured methods, with the question at the prompt's end
# and with a later question (docs/results/questions.md). Its budget is half of the prompt: no model except the demo
# model was measured.
DEFAULT_METHOD = "kvedge"
STREAM_METHOD = "mixkv"  # the default method of streams, in which all heads hold the same number of pairs
DEFAULT_PRUNER = "residual"  # the default pruner if only the number of image tokens is given

_STREAMING = "Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453"
_H2O = "Zhang et al. 2023, H2O: Heavy-Hitter Oracle for Efficient Generative Inference of LLMs, arXiv:2306.14048"
_SNAPKV = "Li et al. 2024, SnapKV: LLM Knows What You are Looking for Before Generation, arXiv:2404.14469"
_PYRAMIDKV = "Cai et al. 2024, PyramidKV: Dynamic KV Cache Compression based on Pyramidal Funneling, arXiv:2406.02069"
_ADAKV = "Feng et al. 2024, Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, arXiv:2407.11550"
_SPARSEMM = "Wang et al. 2025, SparseMM: Head Sparsity Emerges from Visual Concept Responses in MLLMs, arXiv:2506.05344"
_HEADKV = "Fu et al. 2024, Not All Heads Matter: Head-Level KV Cache Compression with Reasoning, arXiv:2410.19258"
_CALIBRATED = "Zweiger et al. 2026, Fast KV Compaction via Attention Matching, arXiv:2602.16284, with MixKV's scores"
_KVEDGE = "this project: MixKV's mixture among image tokens, votes of the last queries, budgets of heads, near merges"
_KEYDIFF = "Park et al. 2025, KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv:2504.15364"
_EXPECTED = "Devoto et al. 2025, Expected Attention: KV Cache Compression by Estimating Attention, arXiv:2510.00636"
_CRITICALKV = ("Feng et al. 2025, Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective, "
               "arXiv:2502.03805")  # fmt: skip
_KVZIP_PLUS = "KVzip+, a variant of KVzip (arXiv:2505.23416) in kvpress, without its division by hidden rows' norms"
_KVZIP = "Kim et al. 2025, KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv:2505.23416"
_KNORM = "Devoto et al. 2024, A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv:2406.11430"
_ELASTIC = ("Liu et al. 2024, Efficient Inference of Vision Instruction-Following Models with Elastic Cache, "
            "arXiv:2407.18121")  # fmt: skip
_PREFIXKV = ("Wang et al. 2024, PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need, "
             "arXiv:2412.03409")  # fmt: skip
_ROCO = ("Ren & Zhu 2024, On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language Model "
         "Inference, arXiv:2402.06262")  # fmt: skip
_MEDA = ("Wan et al. 2025, MEDA: Dynamic KV Cache Allocation for Efficient Multimodal Long-Context Inference, NAACL, "
         "arXiv:2502.17599")  # fmt: skip
_LOOKM = "Wan et al. 2024, LOOK-M: Look-Once Optimization in KV Cache, EMNLP Findings, arXiv:2406.18139"
_MIXKV = ("Liu et al. 2025, Mixing Importance with Diversity: Joint Optimization for KV Cache Compression in Large "
          "Vision-Language Models, arXiv:2510.20707")  # fmt: skip
_FLASHCACHE = ("Yang et al. 2025, Revisiting Multimodal KV Cache Compression: A Frequency-Domain-Guided "
               "Outlier-KV-Aware Approach, arXiv:2511.16786")  # fmt: skip

# One importance for all heads of a layer. The first and the last token always stay.
_LAYERWISE = {"scorer": "cumulative", "params": {"scorer.share": "layer"}, "sinks": 1, "recent": 1}
_PRESETS = (
    Preset("full", "all KV pairs", "the uncompressed cache", {"budget": 1.0}),
    Preset("streaming-llm", "the 4 first tokens and the most recent tokens", _STREAMING,
           {"scorer": "position", "sinks": 4}),
    Preset("h2o", "recent tokens, and tokens that received most attention", _H2O, {"scorer": "cumulative"}),
    Preset("lookm", "as h2o, with text before image tokens; merges the dropped pairs", _LOOKM,
           {"scorer": "cumulative", "text_prior": True, "reducer": "pivotal"}),
    Preset("meda",
           "as lookm, with averaged merging, and more in layers with wide attention between text and images",
           _MEDA, {"scorer": "cumulative", "text_prior": True, "reducer": "averaged", "allocator": "entropy"}),
    Preset("roco", "tokens whose attention varies most, and tokens with the largest mean attention", _ROCO,
           {"scorer": "mean", "sinks": 4}),
    Preset("snapkv", "tokens that the last 32 queries of the prompt attend to, and these 32 tokens", _SNAPKV,
           {"scorer": "window"}),
    Preset("pyramidkv", "as snapkv, with more in lower layers", _PYRAMIDKV,
           {"scorer": "window", "allocator": "pyramid"}),
    Preset("adakv", "as snapkv, with more in heads whose attention is spread widely", _ADAKV,
           {"scorer": "window", "allocator": "ada"}),
    Preset("sparsemm", "as snapkv, with more in visual heads (kvedge calibrate heads)",
           _SPARSEMM, {"scorer": "window", "allocator": "heads"}),
    Preset("headkv",
           "as snapkv, with more in retrieval heads (kvedge calibrate heads --kind retrieval)",
           _HEADKV,
           {"scorer": "window", "allocator": "heads",
            "params": {"scorer.window": 8, "scorer.kernel": 7, "scorer.pool": "max", "allocator.rule": "headkv"}}),
    Preset("mixkv", "as snapkv, with value norms, and with key diversity in heads whose keys are similar", _MIXKV,
           {"scorer": "mixkv", "budget": 0.5}),
    Preset("mixkv-pyramid", "as mixkv, with more in lower layers", _MIXKV,
           {"scorer": "mixkv", "allocator": "pyramid"}),
    Preset("mixkv-ada", "as mixkv, with more in heads with the largest scores", _MIXKV,
           {"scorer": "mixkv", "allocator": "ada"}),
    Preset("mixkv-sparsemm", "as mixkv, with more in visual heads", _MIXKV,
           {"scorer": "mixkv", "allocator": "heads"}),
    Preset("mixkv-headkv", "as mixkv, with more in retrieval heads", _MIXKV,
           {"scorer": "mixkv", "allocator": "heads", "params": {"allocator.rule": "headkv"}}),
    Preset("calibrated",
           "as mixkv, with measured shares of the budget for each head (kvedge calibrate budgets)",
           _CALIBRATED, {"scorer": "mixkv", "allocator": "calibrated"}),
    Preset("kvedge",
           "image tokens and text, each scored by its kind; merges similar pairs; budgets of heads are calibrated or "
           "follow their values",
           _KVEDGE,
           {"scorer": "modal", "allocator": "calibrated", "reducer": "nearest", "sinks": 1, "budget": 0.5,
            "params": {"allocator.unmeasured": "variation", "allocator.measured": 0.1}},
           # a larger budget leaves more room for text, and a dropped pair matters less
           {0.2: {"scorer.text": 8}, 0.5: {"scorer.text": 4, "reducer.reach": 1.2}}),
    Preset("flashcache",
           "keys and values that differ from their smooth part, with more in layers with more such outliers",
           _FLASHCACHE, {"scorer": "dct", "allocator": "spectral"}),
    Preset("elastic", "tokens with most attention in their layer; merges each dropped pair into the nearest kept "
    "pair", _ELASTIC,
           {**_LAYERWISE, "reducer": "bucket", "decode": "fixed-point"}),
    Preset("prefixkv", "in each layer, the number of tokens that hold the same share of the layer's "
    "attention", _PREFIXKV,
           {**_LAYERWISE, "allocator": "prefix", "decode": "ratio"}),
    Preset("keydiff", "tokens whose keys differ most from the other keys, and the last 32 tokens", _KEYDIFF,
           {"scorer": "keydiff"}),
    Preset("expected",
           "tokens that future queries are expected to attend to, with more in heads with the largest scores",
           _EXPECTED,
           {"scorer": "expected", "allocator": "ada", "params": {"scorer.eps": 0.01, "allocator.normalize": False}}),
    Preset("criticalkv",
           "tokens that the last 32 queries attend to, one half also weighted by their effect on the layer's output",
           _CRITICALKV, {"scorer": "window", "critical": "l1"}),
    Preset("criticalkv-ada", "as criticalkv, with more in heads whose attention is spread widely", _CRITICALKV,
           {"scorer": "window", "critical": "l1", "allocator": "ada"}),
    Preset("kvzip",
           "tokens that a second pass over the prompt attends to, with more in heads with the largest scores",
           _KVZIP, {"scorer": "replay", "allocator": "global", "params": {"scorer.source": "repeat"}}),
    Preset("kvzip-uniform", "tokens that a second pass over the prompt attends to, with equal budgets for all "
    "heads", _KVZIP,
           {"scorer": "replay", "params": {"scorer.source": "repeat"}}),
    Preset("kvzip-plus",
           "as kvzip, with attention weighted by the norm of the values after the layer's output projection",
           _KVZIP_PLUS,
           {"scorer": "replay", "allocator": "global",
            "params": {"scorer.source": "repeat", "scorer.projected": True}}),
    Preset("knorm", "tokens whose keys have the smallest norm", _KNORM, {"scorer": "knorm"}),
    Preset("vnorm", "tokens whose values have the largest norm", "a control, and a part of MixKV", {"scorer": "vnorm"}),
    Preset("random", "random tokens", "a control", {"scorer": "random"}),
)  # fmt: skip
PRESETS: Mapping[str, Preset] = {p.name: p for p in _PRESETS}
table.reserve(PRESETS)


def methods() -> list[str]:
    """Returns the names of all methods in the order of the explanation; methods of plugins come last."""
    installed.load_installed()
    return [*PRESETS, *installed.method_names()]


def preset(name: str) -> Preset:
    """Returns the preset called `name`, built in or from a plugin. Raises UnknownNameError with a suggestion."""
    if not isinstance(name, str):
        raise UsageError(f"a method must be given by its name, not {name!r:.40}")
    if name in PRESETS:
        return PRESETS[name]
    found = installed.find_preset(name)
    if found is None:
        raise unknown("method", str(name), [*PRESETS, *installed.method_names()], installed.problems())
    return found


def preset_params(chosen: Preset, budget: Budget, members: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the preset's settings of stage members for a budget, without settings of replaced members.

    members: stage -> member of the plan; a missing stage has the preset's member.
    """
    params = dict(chosen.values.get("params", {}))
    for least, settings in sorted(chosen.by_budget.items()):
        params.update(settings if (budget.ratio or 0) >= least else {})
    replaced = {stage for stage in STAGES if members.get(stage, chosen.values.get(stage)) != chosen.values.get(stage)}
    return {k: v for k, v in params.items() if k.partition(".")[0] not in replaced}


def params_elsewhere(
    method: str, members: Mapping[str, str], params: Mapping[str, Any], at: Budget, to: Budget
) -> dict[str, Any]:
    """Returns the settings of a plan's stage members after its budget changes from `at` to `to`.

    A setting that equals the method's value at `at` becomes the method's value at `to`. Other settings stay: the user
    chose them, their member was replaced, or the method is not installed.
    """
    out = dict(params)
    try:
        chosen = preset(method)
    except UnknownNameError:  # the plan comes from a file, and its method is unknown here
        return out
    before, after = (preset_params(chosen, budget, members) for budget in (at, to))
    for name in {**before, **after}:
        if before.get(name) != after.get(name) and out.get(name) == before.get(name):
            out.pop(name, None)
            out.update({name: after[name]} if name in after else {})
    return out
