"""Text models, architecture by architecture. The common parts are in layers.py."""

import math
from collections.abc import Callable

from .layers import (
    KEY_GAIN,
    Layer,
    Model,
    TextSpec,
    attention_meta,
    attn_out,
    base_meta,
    biased,
    ends,
    ffn,
    head_bands,
    mrope_sections,
    norm,
    normed,
    plain,
    stack,
)
from .writer import Q4_0, Meta, Tensor, fitting_type, matrix, vector

DEEPSTACK = 1  # number of Qwen3-VL layers that add image features to their output


def made_of(layer: Layer, more: Callable[[TextSpec], Meta] = lambda spec: {}) -> Callable[[TextSpec], Model]:
    """Returns an architecture of equal layers. more: metadata in addition to that of attention."""
    return lambda spec: ({**attention_meta(spec), **more(spec)}, [*ends(spec), *stack(spec, layer)])


def _mrope(spec: TextSpec) -> Meta:
    return {f"{spec.arch}.rope.dimension_sections": mrope_sections(spec.head_size)}


def _post_norms(spec: TextSpec, b: str) -> list[Tensor]:
    return [norm(f"{b}.post_{x}_norm.weight", spec.n_embd, mean=spec.out_gain) for x in ("attention", "ffw")]


def _phi3_layer(spec: TextSpec, i: int) -> list[Tensor]:
    """Phi-3: one matrix for query, key and value, one for gate and up."""
    b, n, unit = f"blk.{i}", spec.n_embd, 1 / math.sqrt(spec.n_embd)
    kv = spec.n_heads_kv * spec.head_size
    bands = (*head_bands(spec.n_heads, spec.head_size, unit), (kv, KEY_GAIN * unit), (kv, unit))
    ffn_norm, _, up, down = ffn(spec, b)
    fused = matrix(up.name, (2 * spec.n_ff, n), unit, spec.weight)
    qkv = Tensor(f"{b}.attn_qkv.weight", (n + 2 * kv, n), bands, 0.0, fitting_type(spec.weight, (n,)))
    return [norm(f"{b}.attn_norm.weight", n), qkv, attn_out(spec, b), ffn_norm, fused, down]


def _gemma_ends(spec: TextSpec) -> list[Tensor]:
    """Divides the embeddings by the square root of their width, because Gemma multiplies by it."""
    first, *last = ends(spec)
    return [matrix(first.name, first.shape, 1 / math.sqrt(spec.n_embd), spec.weight), *last]


def gemma3(spec: TextSpec) -> Model:
    """Gemma 3: layers with a sliding window (32 tokens) and full layers in turn."""

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        return [*normed(spec, i), *_post_norms(spec, f"blk.{i}")]

    meta = attention_meta(spec)
    meta["gemma3.attention.sliding_window"] = 32
    meta["gemma3.attention.sliding_window_pattern"] = 2
    return meta, [*_gemma_ends(spec), *stack(spec, layer)]


def lfm2(spec: TextSpec) -> Model:
    """LFM2: short convolutions and attention layers in turn, or where `meta` says: a hybrid."""
    key = "lfm2.attention.head_count_kv"
    heads = spec.meta.get(key) or [spec.n_heads_kv if i % 2 else 0 for i in range(spec.n_layers)]

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        b, n, unit = f"blk.{i}", spec.n_embd, 1 / math.sqrt(spec.n_embd)
        if heads[i]:
            return normed(spec, i)
        return [
            norm(f"{b}.attn_norm.weight", n),
            vector(f"{b}.shortconv.conv.weight", (n, 3), std=0.6),
            matrix(f"{b}.shortconv.in_proj.weight", (3 * n, n), unit, spec.weight),
            matrix(f"{b}.shortconv.out_proj.weight", (n, n), spec.out_gain * unit, spec.weight),
            *ffn(spec, b),
        ]

    meta = attention_meta(spec)
    meta["lfm2.shortconv.l_cache"] = 3
    meta[key] = heads
    return meta, [*ends(spec, "token_embd_norm.weight"), *stack(spec, layer)]


def mamba(spec: TextSpec) -> Model:
    """Mamba: a recurrent state and no KV cache."""
    n, inner, state, conv, rank = spec.n_embd, 2 * spec.n_embd, 16, 4, max(32, spec.n_embd // 16)

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        b, w = f"blk.{i}", spec.weight
        return [
            norm(f"{b}.attn_norm.weight", n),
            matrix(f"{b}.ssm_in.weight", (2 * inner, n), 1 / math.sqrt(n), w),
            vector(f"{b}.ssm_conv1d.weight", (inner, conv), std=0.5),
            vector(f"{b}.ssm_conv1d.bias", inner, std=0.1),
            matrix(f"{b}.ssm_x.weight", (rank + 2 * state, inner), 1 / math.sqrt(inner), w),
            matrix(f"{b}.ssm_dt.weight", (inner, rank), 1 / math.sqrt(rank), w),
            vector(f"{b}.ssm_dt.bias", inner, mean=-3.0, std=1.0),
            vector(f"{b}.ssm_a", (inner, state), mean=-1.0, std=0.2),
            vector(f"{b}.ssm_d", inner, mean=1.0, std=0.1),
            matrix(f"{b}.ssm_out.weight", (n, inner), 2 * spec.out_gain / math.sqrt(inner), w),
        ]

    meta = base_meta(spec) | {
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
        "mamba.ssm.conv_kernel": conv,
        "mamba.ssm.inner_size": inner,
        "mamba.ssm.state_size": state,
        "mamba.ssm.time_step_rank": rank,
    }
    return meta, [*ends(spec), *stack(spec, layer)]


def deepseek2(spec: TextSpec) -> Model:
    """DeepSeek-V2: multi-head latent attention. Every layer is dense here."""
    n, d, rope, rank, heads = spec.n_embd, spec.head_size, spec.head_size // 2, 64, spec.n_heads

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        b, unit, low, w = f"blk.{i}", 1 / math.sqrt(n), 1 / math.sqrt(rank), spec.weight
        q_rows, bands = heads * (d + rope), head_bands(heads, d + rope, unit)
        return [
            norm(f"{b}.attn_norm.weight", n),
            norm(f"{b}.attn_kv_a_norm.weight", rank),
            Tensor(f"{b}.attn_q.weight", (q_rows, n), bands, 0.0, fitting_type(w, (n,))),
            matrix(f"{b}.attn_kv_a_mqa.weight", (rank + rope, n), KEY_GAIN * unit, w),
            matrix(f"{b}.attn_k_b.weight", (heads, rank, d), KEY_GAIN * low, w),
            matrix(f"{b}.attn_v_b.weight", (heads, d, rank), low, w),
            attn_out(spec, b, heads * d),
            *ffn(spec, b),
        ]

    meta = attention_meta(spec) | {
        "deepseek2.attention.head_count_kv": 1,
        "deepseek2.attention.key_length": rank + rope,
        "deepseek2.attention.value_length": rank,
        "deepseek2.attention.key_length_mla": d + rope,
        "deepseek2.attention.value_length_mla": d,
        "deepseek2.attention.kv_lora_rank": rank,
        "deepseek2.attention.q_lora_rank": 0,
        "deepseek2.rope.dimension_count": rope,
        "deepseek2.leading_dense_block_count": spec.n_layers,
        "deepseek2.expert_feed_forward_length": spec.n_ff,
        "deepseek2.expert_shared_count": 0,
    }
    return meta, [*ends(spec), *stack(spec, layer)]


def qwen35(spec: TextSpec) -> Model:
    """Qwen3.5: every second layer attends, with a gate on its output; the others have a state (gated delta net)."""
    n, state, keys, values, conv = spec.n_embd, 32, 2, 4, 4
    unit, inner = 1 / math.sqrt(n), state * values
    width = 2 * state * keys + inner

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        b, w = f"blk.{i}", spec.weight
        tensors = [t for t in normed(spec, i) if ".ffn_norm." not in t.name]
        tensors.append(norm(f"{b}.post_attention_norm.weight", n))
        if i % 2:
            gated = matrix(f"{b}.attn_q.weight", (2 * n, n), unit, w)
            return [*(t for t in tensors if ".attn_q." not in t.name), gated]
        norms = (".attn_norm.weight", "attention_norm.weight")
        return [
            *(t for t in tensors if ".ffn_" in t.name or t.name.endswith(norms)),
            matrix(f"{b}.attn_qkv.weight", (width, n), unit, w),
            matrix(f"{b}.attn_gate.weight", (inner, n), unit, w),
            vector(f"{b}.ssm_conv1d.weight", (width, conv), std=0.5),
            vector(f"{b}.ssm_dt.bias", values, mean=-3.0, std=1.0),
            vector(f"{b}.ssm_a", values, mean=-1.0, std=0.2),
            matrix(f"{b}.ssm_beta.weight", (values, n), unit, w),
            matrix(f"{b}.ssm_alpha.weight", (values, n), unit, w),
            norm(f"{b}.ssm_norm.weight", state),
            matrix(f"{b}.ssm_out.weight", (n, inner), spec.out_gain / math.sqrt(inner), w),
        ]

    meta = attention_meta(spec) | {
        **_mrope(spec),
        "qwen35.full_attention_interval": 2,
        "qwen35.ssm.conv_kernel": conv,
        "qwen35.ssm.inner_size": inner,
        "qwen35.ssm.state_size": state,
        "qwen35.ssm.time_step_rank": values,
        "qwen35.ssm.group_count": keys,
    }
    return meta, [*ends(spec), *stack(spec, layer)]


def _glm4_layer(spec: TextSpec, i: int) -> list[Tensor]:
    """GLM-4.1V's language model: one matrix for gate and up, norms after attention and feed-forward."""
    b, n = f"blk.{i}", spec.n_embd
    doubled = matrix(f"{b}.ffn_up.weight", (2 * spec.n_ff, n), 1 / math.sqrt(n), spec.weight)
    kept = [t for t in plain(spec, i) if not t.name.endswith(("ffn_gate.weight", "ffn_up.weight"))]
    return [*kept, doubled, *_post_norms(spec, b)]


def _unscaled(spec: TextSpec) -> float:
    """Norm weight of queries and keys that replaces the division of attention by the root of the head size."""
    return 1.5 / spec.head_size**0.25


_GEMMA4_SHARING = 2  # in E2B and E4B models, this number of last layers have no keys and values
_GEMMA4_EXTRA = 16  # width of the embedding that each layer of E2B and E4B models adds for a token


def gemma4(spec: TextSpec) -> Model:
    """Gemma 4: windows of 32 tokens in every other layer. With 6 layers as E2B and E4B: the last 2 share a cache."""
    n, pairs = spec.n_embd, spec.head_size // 2
    extra = _GEMMA4_EXTRA if spec.n_layers == 3 * _GEMMA4_SHARING else 0
    owners = spec.n_layers - (_GEMMA4_SHARING if extra else 0)

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        b = f"blk.{i}"
        own = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
        tensors = [t for t in normed(spec, i, _unscaled(spec)) if i < owners or not t.name.endswith(own)]
        tensors += _post_norms(spec, b)
        if extra:
            tensors += [
                matrix(f"{b}.inp_gate.weight", (extra, n), 1 / math.sqrt(n), spec.weight),
                matrix(f"{b}.proj.weight", (n, extra), 1 / math.sqrt(extra), spec.weight),
                norm(f"{b}.post_norm.weight", n, mean=0.5 * spec.out_gain),
            ]
        return tensors

    meta = attention_meta(spec) | {
        "gemma4.attention.sliding_window": 32,
        "gemma4.attention.sliding_window_pattern": [i % 2 == 0 for i in range(spec.n_layers)],
        "gemma4.attention.key_length_swa": spec.head_size,
        "gemma4.attention.value_length_swa": spec.head_size,
        "gemma4.attention.shared_kv_layers": spec.n_layers - owners,
        "gemma4.embedding_length_per_layer_input": extra,
        "gemma4.final_logit_softcapping": 30.0,
    }
    tensors = [*_gemma_ends(spec), vector("rope_freqs.weight", pairs, mean=1.0)]
    if extra:
        width = extra * spec.n_layers
        tensors += [
            matrix("per_layer_token_embd.weight", (spec.vocab.size, width), 1 / math.sqrt(extra), spec.weight),
            matrix("per_layer_model_proj.weight", (width, n), 1.0, spec.weight),
            norm("per_layer_proj_norm.weight", extra),
        ]
    return meta, [*tensors, *stack(spec, layer)]


def gemma3n(spec: TextSpec) -> Model:
    """Gemma 3n: from layer 20 on, the layers read the cache of layers 18 and 19. 25 layers include a full one there.

    AltUp keeps 4 versions of each token, and every layer adds an embedding of the token, 256 wide.
    """
    n, copies, extra, rank = spec.n_embd, 4, 256, 64
    unit, width = 1 / math.sqrt(n), extra * spec.n_layers

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        b, w = f"blk.{i}", spec.weight
        return [
            *normed(spec, i, _unscaled(spec)),
            *_post_norms(spec, b),
            matrix(f"{b}.inp_gate.weight", (extra, n), unit, w),
            matrix(f"{b}.proj.weight", (n, extra), 1 / math.sqrt(extra), w),
            norm(f"{b}.post_norm.weight", n, mean=0.5 * spec.out_gain),
            vector(f"{b}.altup_correct_coef.weight", (copies, copies), std=0.1),
            norm(f"{b}.altup_correct_scale.weight", n),
            vector(f"{b}.altup_predict_coef.weight", (copies**2, copies), std=0.1),
            vector(f"{b}.altup_router.weight", (copies, n), std=1.0),
            norm(f"{b}.altup_router_norm.weight", n),
            matrix(f"{b}.laurel_l.weight", (rank, n), unit, w),
            matrix(f"{b}.laurel_r.weight", (n, rank), 1 / math.sqrt(rank), w),
            norm(f"{b}.laurel_post_norm.weight", n, mean=spec.out_gain),
        ]

    meta = attention_meta(spec) | {"gemma3n.attention.sliding_window": 32}
    return meta, [
        *_gemma_ends(spec),
        matrix("altup_proj.weight", (copies - 1, n, n), unit, spec.weight),
        matrix("altup_unembd_proj.weight", (copies - 1, n, n), unit, spec.weight),
        matrix("per_layer_token_embd.weight", (spec.vocab.size, width), 1 / math.sqrt(extra), Q4_0),
        matrix("per_layer_model_proj.weight", (width, n), 1.0, spec.weight),
        norm("per_layer_proj_norm.weight", extra),
        *stack(spec, layer),
    ]


def llama4(spec: TextSpec) -> Model:
    """Llama 4: three of four layers attend in chunks of 8192 tokens; every second one has 2 experts, one active."""
    n, experts, wide = spec.n_embd, 2, spec.n_ff // 2

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        if i % 2 == 0:
            return plain(spec, i)
        b, unit, w = f"blk.{i}", 1 / math.sqrt(n), spec.weight
        tensors = [t for t in plain(spec, i) if not any(x in t.name for x in (".ffn_gate.", ".ffn_up.", ".ffn_down."))]
        tensors.append(matrix(f"{b}.ffn_gate_inp.weight", (experts, n), unit, w))
        for name, shape, std in (
            ("gate", (wide, n), unit), ("up", (wide, n), unit), ("down", (n, wide), spec.out_gain / math.sqrt(wide))
        ):  # fmt: skip
            tensors.append(matrix(f"{b}.ffn_{name}_exps.weight", (experts, *shape), std, w))
            tensors.append(matrix(f"{b}.ffn_{name}_shexp.weight", shape, std, w))
        return tensors

    meta = attention_meta(spec) | {
        "llama4.expert_count": experts,
        "llama4.expert_used_count": 1,
        "llama4.expert_feed_forward_length": wide,
        "llama4.interleave_moe_layer_step": 2,
    }
    return meta, [*ends(spec), *stack(spec, layer)]


ARCHITECTURES: dict[str, Callable[[TextSpec], Model]] = {
    "llama": made_of(plain),  # also Vicuna, MobileLLaMA and Mistral: llama.cpp treats them alike
    "qwen2vl": made_of(biased, _mrope),
    "qwen3": made_of(normed),
    "phi3": made_of(_phi3_layer),
    "gemma3": gemma3,
    "lfm2": lfm2,
    "mamba": mamba,
    "deepseek2": deepseek2,
    "qwen2": made_of(biased),  # InternVL and MiniCPM-V are built on it
    "mistral3": made_of(plain),  # Mistral Small and Ministral 3
    # image embeddings are wider than the model: the first layers add the further parts
    "qwen3vl": made_of(normed, lambda spec: {**_mrope(spec), "qwen3vl.n_deepstack_layers": DEEPSTACK}),
    "qwen35": qwen35,
    "glm4": made_of(_glm4_layer, _mrope),
    "gemma4": gemma4,
    "llama4": llama4,
    "gemma3n": gemma3n,
}


def text_model(spec: TextSpec) -> Model:
    """Returns the metadata, with the tokenizer, and the tensors."""
    meta, tensors = ARCHITECTURES[spec.arch](spec)
    return meta | dict(spec.meta) | spec.vocab.meta, tensors
