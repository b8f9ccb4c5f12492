#include "device/tensors.h"

#include <algorithm>
#include <new>

namespace kvedge {

GgmlContext make_context(size_t bytes) {
    GgmlContext context(ggml_init({ bytes, nullptr, true }));
    if (!context) {
        throw std::bad_alloc();
    }
    return context;
}

Tensors::Tensors(size_t n) : context_(make_context(n * ggml_tensor_overhead())) {}

ggml_tensor * Tensors::add(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2) {
    return ggml_new_tensor_3d(context_.get(), type, ne0, ne1, ne2);
}

bool Tensors::allocate(ggml_backend_dev_t device) {
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), ggml_backend_dev_buffer_type(device)));
    if (!buffer_) {
        return false;
    }
    ggml_backend_buffer_clear(buffer_.get(), 0);  // masked slots have weight 0, but 0 times a NaN would be NaN
    return true;
}

GraphBuilder::GraphBuilder(size_t nodes)
    : context(make_context(nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(nodes, false))),
      graph(ggml_new_graph_custom(context.get(), nodes, false)) {}

ggml_tensor * flat(ggml_context * c, ggml_tensor * x) { return ggml_view_2d(c, x, x->ne[0], x->ne[1] * x->ne[2], x->nb[1], 0); }

ggml_tensor * flat_as(ggml_context * c, ggml_tensor * x, ggml_type type) {
    ggml_tensor * out = flat(c, x);
    out->type         = type;
    out->ne[0]        = (int64_t) (x->nb[1] / ggml_type_size(type)) * ggml_blck_size(type);
    out->nb[0]        = ggml_type_size(type);
    return out;
}

ggml_tensor * whole(ggml_context * c, ggml_tensor * x) { return ggml_is_contiguous(x) ? x : ggml_cont(c, x); }

ggml_tensor * product(ggml_context * c, ggml_tensor * a, ggml_tensor * b) {
    ggml_tensor * out = ggml_mul_mat(c, a, b);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    return out;
}

ggml_tensor * squares(ggml_context * c, ggml_tensor * rows) { return ggml_sum_rows(c, ggml_sqr(c, rows)); }

void write_to(ggml_tensor * result, const ggml_tensor * to, size_t offset) {
    ggml_backend_tensor_alloc(to->buffer, result, (char *) to->data + offset);
}

bool as_numbers(const ggml_tensor * rows) { return rows->nb[1] % sizeof(int32_t) == 0; }

ggml_tensor * gathered(ggml_context * c, ggml_tensor * from, ggml_tensor * index, ggml_tensor * to) {
    if (from->type == to->type) {
        ggml_tensor * out = ggml_get_rows(c, flat_as(c, from, GGML_TYPE_I32), index);
        write_to(out, to);
        return out;
    }
    return ggml_cpy(c, ggml_get_rows(c, from, index), flat(c, to));
}

int64_t operations_of(ggml_cgraph * graph) {
    int64_t n = 0;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_op op = ggml_graph_node(graph, i)->op;
        n += op != GGML_OP_NONE && op != GGML_OP_VIEW && op != GGML_OP_RESHAPE && op != GGML_OP_PERMUTE && op != GGML_OP_TRANSPOSE;
    }
    return n;
}

void copy_slots(ggml_tensor * from, ggml_tensor * to, int64_t n) {
    std::vector<int32_t> first, end, starts;
    for (int64_t h = 0; h < from->ne[2]; h++) {
        first.push_back((int32_t) (h * from->ne[1]));
        end.push_back((int32_t) (first.back() + n));
        starts.push_back((int32_t) (h * to->ne[1]));
    }
    copy_regions(from, to, first, end, starts);
}

ggml_tensor * depend_on(ggml_tensor * view, ggml_tensor * node) {
    ggml_tensor ** const end  = view->src + GGML_MAX_SRC;
    ggml_tensor ** const free = std::find(view->src, end, nullptr);
    if (node && free != end) {
        *free = node;
    }
    return view;
}

void copy_regions(ggml_tensor * from, ggml_tensor * to, const std::vector<int32_t> & first, const std::vector<int32_t> & end,
                  const std::vector<int32_t> & starts) {
    const GgmlContext context = make_context(2 * first.size() * ggml_tensor_overhead());
    const auto        region  = [&](ggml_tensor * x, int32_t at, int32_t n) {
        ggml_tensor * part = ggml_view_2d(context.get(), x, x->ne[0], n, x->nb[1], (size_t) at * x->nb[1]);
        ggml_backend_view_init(part);
        return part;
    };
    for (size_t i = 0; i < first.size(); i++) {
        const int32_t n = end[i] - first[i];
        if (n > 0) {
            ggml_tensor * const rows = region(from, first[i], n);
            ggml_backend_tensor_copy(rows, region(to, starts[i], n));
        }
    }
}

const char * lacking(ggml_backend_dev_t device, ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (!ggml_backend_dev_supports_op(device, node)) {
            return ggml_op_desc(node);
        }
    }
    return nullptr;
}

uint8_t * Staging::room(ggml_backend_dev_t device, size_t bytes) {
    if (pinned_ && ggml_backend_buffer_get_size(pinned_.get()) >= bytes) {
        return (uint8_t *) ggml_backend_buffer_get_base(pinned_.get());
    }
    pinned_.reset();
    const auto type = ggml_backend_dev_host_buffer_type(device);
    pinned_.reset(type && plain_.empty() ? ggml_backend_buft_alloc_buffer(type, bytes) : nullptr);
    if (pinned_) {
        return (uint8_t *) ggml_backend_buffer_get_base(pinned_.get());
    }
    plain_.resize(std::max(plain_.size(), bytes));
    return plain_.data();
}

bool Worker::make_room(ggml_backend_dev_t device, ggml_cgraph * graph, int32_t n_threads) {
    if (!backend_) {
        backend_.reset(ggml_backend_dev_init(device, nullptr));
        const auto set_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device),
                                                                                                  "ggml_backend_set_n_threads");
        if (backend_ && set_threads) {
            set_threads(backend_.get(), n_threads);
        }
    }
    if (!memory_) {
        memory_.reset(ggml_gallocr_new(ggml_backend_dev_buffer_type(device)));
    }
    return backend_ && ggml_gallocr_reserve(memory_.get(), graph);
}

std::shared_ptr<ggml_backend_buffer> Worker::lend(ggml_backend_dev_t device, size_t bytes) {
    constexpr size_t KEPT = 8 << 20;  // bytes up to which a buffer is kept for reuse: a GPU is slow to allocate
    if (lent_ && lent_.use_count() == 1 && ggml_backend_buffer_get_size(lent_.get()) >= bytes) {
        return lent_;
    }
    std::shared_ptr<ggml_backend_buffer> out(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device), bytes), FreeGgml());
    if (bytes <= KEPT) {
        lent_ = out;
    }
    return out;
}

bool Worker::compute(ggml_cgraph * graph) {
    return ggml_gallocr_alloc_graph(memory_.get(), graph) &&
           ggml_backend_graph_compute(backend_.get(), graph) == GGML_STATUS_SUCCESS;
}

}  // namespace kvedge
