// The part of Measuring that uses kvedge's operations (own.h), which read half-precision rows in the cache tensors without a copy.

#include "device/measuring.h"

#include "device/own.h"

#include <algorithm>
#include <numeric>

namespace kvedge {

using T = ggml_tensor *;

T own_operation(ggml_context * c, int kind, const MeasuredRows & rows, T matrix, int64_t ne0, int64_t ne1,
                std::initializer_list<int64_t> with) {
    T         out = ggml_new_tensor_2d(c, GGML_TYPE_F32, ne0, ne1);
    int32_t * to  = out->op_params + OWN_KIND;
    *to++         = kind;
    *to++         = (int32_t) rows.heads;
    std::transform(with.begin(), with.end(), to, [](int64_t x) { return (int32_t) x; });
    out->op     = GGML_OP_FLASH_ATTN_EXT;
    out->src[0] = rows.k;
    out->src[1] = rows.v;
    out->src[2] = matrix ? matrix : rows.v;  // ggml requires a src[2]
    out->src[5] = rows.list;
    return out;
}

// Returns the rows of all pending tokens, or only of the tokens in of_kind.
MeasuredRows GraphRows::Measuring::measured(const Part & part, bool of_the_kind) {
    const auto n = of_the_kind ? (int64_t) of_kind.size() : job.n_tokens, heads = (int64_t) part.heads.size();
    const auto token = [this, of_the_kind](int64_t i) { return of_the_kind ? of_kind[(size_t) i] : (int32_t) i; };
    if (even()) {
        T & list = own_lists[of_the_kind && job.wanted.by_kind];
        if (!list) {
            list = ggml_new_tensor_2d(c, GGML_TYPE_I32, n, 1);
            transfer.send<int32_t>(list, [token, n](int32_t * to, int32_t) {
                for (int64_t i = 0; i < n; i++) {
                    *to++ = token(i);
                }
            });
        }
        return { lying(part, true, job.n_tokens), lying(part, false, job.n_tokens), list, heads };
    }
    T own_list = ggml_new_tensor_2d(c, GGML_TYPE_I32, n, heads);
    transfer.send<int32_t>(own_list, [this, token, n, &part](int32_t * to, int32_t) {
        for (const int32_t head : part.heads) {
            const auto   all   = slots.places_of(part.layer, head);
            const size_t first = all.size() - (size_t) job.n_tokens;
            for (int64_t i = 0; i < n; i++) {
                *to++ = all[first + (size_t) token(i)];
            }
        }
    });
    return { flat(c, part.group->k), flat(c, part.group->v), own_list, heads };
}

// Returns the OwnLengths bits that OWN_LENGTHS must compute.
static int lengths_of(const WantedMeasures & wanted, bool high) {
    return (wanted.key_norms ? KEY_SQUARES : 0) | (wanted.value_norms ? VALUE_SQUARES : 0) |
           (wanted.anchor != WantedMeasures::Anchor::none ? PRODUCTS : 0) | (high && !wanted.by_kind ? ENERGIES : 0);
}

// Returns the number of parts of a head's rows. A CUDA block computes one part.
static int64_t parts_of(int32_t n_tokens) { return std::clamp((int64_t) n_tokens / 128, (int64_t) 1, (int64_t) 64); }

// Returns whether votes multiply f16 keys without a conversion to f32. A GPU sums such products in f32, but some CPUs in f16.
bool GraphRows::Measuring::reads_half() const {
    return own && even() && slots.form.storage.k == Type::f16 && ggml_backend_dev_type(on.device) != GGML_BACKEND_DEVICE_TYPE_CPU;
}

void GraphRows::Measuring::make_own(Part & part) {
    const int     how = lengths_of(job.wanted, asks_high());
    const int64_t heads = (int64_t) part.heads.size(), d = shape(part).d_k, parts = parts_of(job.n_tokens);
    if (how != 0) {
        const MeasuredRows all = measured(part, false);
        T                  sum = nullptr;
        if (how & PRODUCTS) {
            const bool unit = job.wanted.anchor == WantedMeasures::Anchor::unit;
            sum         = own_operation(c, OWN_SUM, all, nullptr, d * parts, heads, { parts, unit });
            sum->src[3] = counts;
        }
        const int64_t columns = ((how & KEY_SQUARES) != 0) + ((how & VALUE_SQUARES) != 0) + ((how & PRODUCTS) != 0);
        const int64_t others  = (how & PRODUCTS ? d : 0) + (how & ENERGIES ? 2 * parts : 0);
        T lengths      = own_operation(c, OWN_LENGTHS, all, nullptr, heads * (columns * job.n_tokens + others), 1, { parts, how });
        lengths->src[3] = sum;
        part.lengths    = result(lengths);
    }
    if (asks_high()) {
        part.high = result(filter.deviation(c, measured(part, true)));
    }
}

void GraphRows::Measuring::read_own(const Part & part, Measures & out, Energy & energy) const {
    const auto   n = (size_t) job.n_tokens, d = (size_t) shape(part).d_k, heads = part.heads.size();
    const int    how   = lengths_of(job.wanted, asks_high());
    const double share = 1.0 / (double) std::max(of_kind.size(), (size_t) 1);
    const float * from = part.lengths ? transfer.values(part.lengths) : nullptr;
    const auto    each = [&](auto & to, double factor) {
        for (const int32_t head : part.heads) {
            std::transform(from, from + n, to.begin() + (std::ptrdiff_t) ((size_t) head * n), [factor](float v) { return v * factor; });
            from += n;
        }
    };
    const auto add = [&](double (&to)[2], int64_t count) {
        for (double & sum : to) {
            sum = std::accumulate(from, from + count, sum);
            from += count;
        }
    };
    if (how & KEY_SQUARES) {
        each(out.key_squares, 1.0);
    }
    if (how & VALUE_SQUARES) {
        each(out.value_squares, 1.0);
    }
    if (how & PRODUCTS) {
        each(out.cosines, share);
        for (const int32_t head : part.heads) {
            out.anchor_squares[(size_t) head] = std::accumulate(from, from + d, 0.0, [share](double sum, float x) {
                return sum + (double) x * share * (double) x * share;
            });
            from += d;
        }
    }
    if (how & ENERGIES) {
        add(energy.all, (int64_t) heads * parts_of(job.n_tokens));
    }
    if (part.high) {
        from = transfer.values(part.high);
        for (const int32_t head : part.heads) {
            for (const int32_t t : of_kind) {
                out.deviation[(size_t) head * n + (size_t) t] = *from++;
            }
        }
        add(energy.high, (int64_t) heads * filter.boxes());
    }
}

}  // namespace kvedge
