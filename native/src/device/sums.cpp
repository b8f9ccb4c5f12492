// Sums of a prompt's attention (H2O, LOOK-M eq. 4) on the device of each layer. Flash attention exposes no weights, so the graph
// computes the weights once more and adds them to tensors that outlive the graph. Uses OWN_SUMS (cuda/sums.cu, cpu/sums.cpp) if
// the device has it, else plain ggml operations on some KV heads at a time.

#include "device/own.h"
#include "device/seen.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace kvedge {

using T = ggml_tensor *;

namespace {

constexpr int64_t MATRIX = 8 << 20;  // bytes of weights of a piece; a layer with fewer bytes is one piece

int64_t pieces(int64_t n, int64_t of) { return (n + of - 1) / of; }

// Puts the result of an operation into `memory`, unless the operation needs more memory than its result. In llama.cpp's graph memory
// the result would grow with the prompt, and each new size would make llama.cpp wait and plan its memory anew.
T lie_in(T memory, T x) {
    if (ggml_backend_buffer_get_alloc_size(memory->buffer, x) <= ggml_nbytes(memory)) {
        ggml_backend_tensor_alloc(memory->buffer, x, memory->data);
    }
    return x;
}

// Puts weights and the products they are made of into the same memory: all operations between them work in place.
T in_place(T memory, T weights) {
    for (T t = weights; t->op != GGML_OP_MUL_MAT; t = t->src[0]) {
        lie_in(memory, t->src[0]);
    }
    return lie_in(memory, weights);
}

// A piece of the weights a [shown, n, query heads], whose rows from `first` on are added to the sums.
struct Piece {
    ggml_context * c;
    T              a;
    int64_t        first, share, heads;  // share: query heads per KV head; heads: KV heads of the piece
    size_t         head;                 // index of the first KV head in the sums
    T              last;                 // the last addition: the next piece must wait for it, as pieces share memory

    // Adds x [rows, 1, heads] to the sums [.., all heads].
    void add(T sums, T x) {
        T to = ggml_view_3d(c, sums, x->ne[0], 1, heads, sums->nb[1], sums->nb[1], head * sums->nb[1]);
        last = ggml_add_inplace(c, depend_on(to, last), x);
    }

    T rows(int64_t n, size_t at) const {
        const size_t start = (size_t) first * sizeof(float) + at;
        return ggml_view_3d(c, a, a->ne[0] - first, n, heads, a->nb[1], (size_t) share * a->nb[2], start);
    }

    void add_columns(T sums, T turned, T sum) {
        T x = lie_in(turned, ggml_cont(c, ggml_transpose(c, rows(a->ne[1] * share, 0))));
        x   = lie_in(sum, ggml_sum_rows(c, x));
        add(sums, ggml_reshape_3d(c, x, a->ne[0] - first, 1, heads));
    }

    void add_squares(T sums) {
        T sum = nullptr;
        for (int64_t g = 0; g < share; g++) {
            T one = rows(a->ne[1], (size_t) g * a->nb[2]);
            sum   = sum ? ggml_add(c, sum, one) : ggml_cont(c, one);
        }
        T x = ggml_sum_rows(c, ggml_cont(c, ggml_transpose(c, ggml_mul(c, sum, sum))));
        add(sums, ggml_reshape_3d(c, x, a->ne[0] - first, 1, heads));
    }

    void add_entropy(T sums) {
        constexpr float NEVER_ZERO = 1e-30f;  // avoids log(0); below any weight that matters
        T               terms      = ggml_mul(c, a, ggml_log(c, ggml_scale_bias(c, a, 1.0f, NEVER_ZERO)));
        T               sum        = ggml_sum_rows(c, ggml_reshape_2d(c, terms, a->ne[0] * a->ne[1] * share, heads));
        add(sums, ggml_reshape_3d(c, sum, 1, 1, heads));
    }
};

}  // namespace

T attention_sums(const GraphLayer & in, T k, T mask, const Added & to) {
    T         out      = ggml_view_tensor(in.ctx, to.entropy);
    T         src[]    = { in.q, k, mask, to.columns, to.squares, to.entropy, in.sinks };
    const int params[] = { OWN_SUMS, to.from, to.adds_entropy };
    out->op = GGML_OP_FLASH_ATTN_EXT;
    std::copy(std::begin(src), std::end(src), out->src);
    std::memcpy(out->op_params, &in.scale, sizeof(float));
    std::memcpy(out->op_params + 2, &in.softcap, sizeof(float));
    std::copy(std::begin(params), std::end(params), out->op_params + OWN_KIND);
    return out;
}

bool has_sums(ggml_backend_dev_t device, const LayerShape & shape, const Storage & storage) {
    if (storage.quantised() || !has_own(device)) {
        return false;
    }
    constexpr size_t  TENSORS = 8;
    constexpr int64_t ROWS = 256;
    const GgmlContext context = make_context(TENSORS * ggml_tensor_overhead());
    ggml_context *    c       = context.get();
    const auto        sums    = [&](int64_t n) { return ggml_new_tensor_2d(c, GGML_TYPE_F32, n, shape.n_heads_kv); };
    T q    = ggml_new_tensor_3d(c, GGML_TYPE_F32, shape.d_k, shape.n_heads, ROWS);
    T k    = ggml_new_tensor_3d(c, ggml_type_of(storage.k), shape.d_k, ROWS, shape.n_heads_kv);
    T mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, ROWS, ROWS);
    const Added to = { sums(ROWS), sums(ROWS), sums(1), 0, true };
    return ggml_backend_dev_supports_op(device, attention_sums({ c, q, k, nullptr, nullptr, 1.0f, shape.softcap }, k, mask, to));
}

int32_t summing_nodes(const LayerShape & shape) {
    constexpr int32_t WEIGHTS = 10, COLUMNS = 7, SQUARES = 8, ENTROPY = 8;
    return WEIGHTS + COLUMNS + SQUARES + 2 * shape.n_heads / shape.n_heads_kv + ENTROPY;
}

// Returns the size of a piece for the longest graph. Shorter graphs have the same number of pieces, of a smaller size.
Sums::Cut Sums::cut_of(const LayerShape & shape) const {
    const int64_t shown = from_ + rows_, n = queries_, n_kv = shape.n_heads_kv;
    const int64_t parts = std::min<int64_t>(pieces((int64_t) sizeof(float) * shown * n * shape.n_heads, MATRIX), parts_);
    const int64_t heads = pieces(n_kv, parts);
    return { heads, pieces(n, std::max<int64_t>(1, parts / pieces(n_kv, heads))) };
}

int64_t Sums::piece_of(const LayerShape & shape) const {
    const Cut cut = cut_of(shape);
    return (from_ + rows_) * cut.queries * cut.heads * (shape.n_heads / shape.n_heads_kv);
}

T Sums::add_up(const GraphLayer & in, size_t l, T k, T mask) const {
    if (!now_.any()) {
        return nullptr;
    }
    ggml_context *        c     = in.ctx;
    const DeviceLayer &   layer = slots_.layers[l];
    const DeviceTensors & to    = on_[layer.on];
    const auto            ours  = [&](T sums) {
        return sums ? ggml_view_2d(c, sums, sums->ne[0], k->ne[2], sums->nb[1], layer.head_at * sums->nb[1]) : nullptr;
    };
    if (to.own) {
        const T columns = now_.columns ? ours(to.columns) : nullptr, squares = now_.squares ? ours(to.squares) : nullptr;
        return attention_sums(in, k, mask, { columns, squares, ours(to.entropy), from_, now_.entropy });
    }
    const Cut          cut   = cut_of((*slots_.shapes)[l]);
    const T            q     = in.q;
    const int64_t      n = q->ne[2], shown = mask->ne[0], n_kv = k->ne[2], share = q->ne[1] / n_kv;
    T                  last = nullptr;
    for (int64_t h = 0; h < n_kv; h += cut.heads) {
        for (int64_t t = 0; t < n; t += cut.queries) {
            const int64_t m = std::min(cut.queries, n - t), some = std::min(cut.heads, n_kv - h);
            const size_t  at = (size_t) (h * share) * q->nb[1] + (size_t) t * q->nb[2];
            T             of   = depend_on(ggml_view_3d(c, q, q->ne[0], some * share, m, q->nb[1], q->nb[2], at), last);
            T             keys = ggml_view_3d(c, k, k->ne[0], shown, some, k->nb[1], k->nb[2], (size_t) h * k->nb[2]);
            T             seen = ggml_view_2d(c, mask, shown, m, mask->nb[1], (size_t) t * mask->nb[1]);
            T     weights = attention_weights(c, ggml_permute(c, of, 0, 2, 1, 3), keys, seen, in.scale, in.softcap);
            Piece piece   = { c, in_place(to.weights, weights), from_, share, some, layer.head_at + (size_t) h, last };
            if (now_.columns) {
                piece.add_columns(to.columns, to.turned, to.sum);
            }
            if (now_.squares) {
                piece.add_squares(to.squares);
            }
            if (now_.entropy) {
                piece.add_entropy(to.entropy);
            }
            last = piece.last;
        }
    }
    return last;
}

}  // namespace kvedge
