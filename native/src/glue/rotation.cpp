#include "glue/rotation.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvedge {

namespace {

// The parameters that ggml_rope_impl writes into a tensor.
struct Parameters {
    int32_t n_dims, mode, n_ctx_orig, offset;
    int32_t sections[GGML_MROPE_SECTIONS];
    float   base, scale, mix, beta_fast, beta_slow;
};

Parameters parameters(const ggml_tensor & rope) {
    const auto number = [&](int i) {
        float x;
        memcpy(&x, rope.op_params + i, sizeof(x));
        return x;
    };
    const int32_t * p = rope.op_params;
    return { p[1], p[2], p[4], p[15], { p[11], p[12], p[13], p[14] }, number(5), number(6), number(7), number(9), number(10) };
}

bool is_weight(const ggml_tensor * t) { return t && t->op == GGML_OP_NONE && !(t->flags & GGML_TENSOR_FLAG_INPUT); }

// Returns the operation that rotated the queries, or NULL. known: no other operation on the way depends on the position, and every
// operation behind the rotation commutes with it.
const ggml_tensor * find_rope(const ggml_tensor * q, bool & known) {
    constexpr int LONGEST = 16;  // operations between a projection and its attention
    bool          mixes   = false;
    known = true;
    for (int i = 0; q && i < LONGEST; i++) {
        switch (q->op) {
            case GGML_OP_ROPE:
                known = !mixes;
                return known ? q : nullptr;
            case GGML_OP_MUL_MAT:
                known = is_weight(q->src[0]);
                return nullptr;
            case GGML_OP_ADD:
            case GGML_OP_MUL:
                known = is_weight(q->src[1]);
                mixes = true;
                break;
            case GGML_OP_NORM:
                mixes = true;
                break;
            case GGML_OP_VIEW:
            case GGML_OP_RESHAPE:
            case GGML_OP_PERMUTE:
            case GGML_OP_CONT:
            case GGML_OP_SCALE:
            case GGML_OP_RMS_NORM:
                break;
            default:
                known = false;
        }
        if (!known) {
            return nullptr;
        }
        q = q->src[0];
    }
    known = false;
    return nullptr;
}

// Reads factors [n], by which frequencies are divided; empty: none. False: the factors cannot be read.
bool read_factors(const ggml_tensor * from, size_t n, std::vector<float> & factors) {
    if (!from) {
        return true;
    }
    if (!from->buffer || !from->data || from->type != GGML_TYPE_F32 || from->ne[0] < (int64_t) n || !ggml_is_contiguous(from)) {
        return false;
    }
    factors.resize(n);
    ggml_backend_tensor_get(from, factors.data(), 0, n * sizeof(float));
    return std::all_of(factors.begin(), factors.end(), [](float x) { return std::isfinite(x) && x != 0.0f; });
}

// Returns the angles as rope_yarn in ggml: frequencies that turn often within the trained context stay, the others are scaled. YaRN's
// factor of lengths is left out: it cancels, since rows are rotated back and then on.
std::vector<double> angles_of(const Parameters & p, const std::vector<float> & factors) {
    float ramp[2] = { 0.0f, 0.0f };
    if (p.mix != 0.0f) {
        ggml_rope_yarn_corr_dims(p.n_dims, p.n_ctx_orig, p.base, p.beta_fast, p.beta_slow, ramp);
    }
    std::vector<double> out;
    for (int32_t i = 0; i < p.n_dims / 2; i++) {
        const double as_trained = std::pow((double) p.base, -2.0 * i / p.n_dims) / (factors.empty() ? 1.0 : (double) factors[(size_t) i]);
        const double along      = ((double) i - (double) ramp[0]) / std::max(0.001, (double) ramp[1] - (double) ramp[0]);
        const double own        = p.mix == 0.0f ? 0.0 : (1.0 - std::clamp(along, 0.0, 1.0)) * (double) p.mix;
        out.push_back(as_trained * ((double) p.scale * (1.0 - own) + own));
    }
    return out;
}

// Returns which position rotates each pair, as ggml_mrope_cache_init.
std::vector<uint8_t> axes_of(const Parameters & p) {
    const int32_t *      s   = p.sections;
    const int32_t        all = s[0] + s[1] + s[2] + s[3];
    std::vector<uint8_t> out;
    for (int32_t i = 0; i < p.n_dims / 2 && all > 0; i++) {
        const int32_t at = i % all, third = at % 3;
        const int32_t block = at < s[0] ? 0 : at < s[0] + s[1] ? 1 : at < s[0] + s[1] + s[2] ? 2 : LAST_PLACE;
        out.push_back((uint8_t) (p.mode != GGML_ROPE_TYPE_IMROPE ? block : at < 3 * s[third] ? third : LAST_PLACE));
    }
    return out;
}

Rotation not_known(const char * why) {
    Rotation out;
    out.unknown = why;
    return out;
}

// Returns the rotation of queries or keys x [d][heads][tokens].
Rotation rotation_of(const ggml_tensor * x) {
    bool                known;
    const ggml_tensor * rope = find_rope(x, known);
    if (!rope) {
        return known ? Rotation() : not_known("the model uses positions in a way that kvedge does not know");
    }
    const Parameters p = parameters(*rope);
    const bool several = p.mode == GGML_ROPE_TYPE_MROPE || p.mode == GGML_ROPE_TYPE_IMROPE;
    Rotation   out;
    out.axes = several ? axes_of(p) : std::vector<uint8_t>();
    if ((!several && p.mode != GGML_ROPE_TYPE_NORMAL && p.mode != GGML_ROPE_TYPE_NEOX) || several == out.axes.empty() ||
        p.offset != 0 || p.n_dims % 2 != 0 || p.n_dims > x->ne[0] || rope->ne[0] != x->ne[0] || rope->ne[1] != x->ne[1]) {
        return not_known("the rotary embedding (RoPE) has a form that kvedge does not know");
    }
    std::vector<float> factors;
    if (!read_factors(rope->src[2], (size_t) p.n_dims / 2, factors)) {
        return not_known("the frequency factors of the rotary embedding (RoPE) cannot be read");
    }
    out.halves = p.mode != GGML_ROPE_TYPE_NORMAL;
    out.angles = angles_of(p, factors);
    return out;
}

}  // namespace

Rotation rotation_of(const llama_attn_provider_layer & layer) {
    Rotation       out  = rotation_of(layer.q);
    const Rotation keys = rotation_of(layer.k);
    if (!keys.unknown.empty()) {
        out.unlike = keys.unknown;
    } else if (out.halves != keys.halves || out.angles != keys.angles || out.axes != keys.axes) {
        out.unlike = "keys and queries have different rotary embeddings (RoPE)";
    }
    return out;
}

}  // namespace kvedge
