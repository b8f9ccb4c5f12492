#include "glue/projection.h"

#include "device/graph_transfer.h"
#include "plan/custom.h"
#include "system/threads.h"
#include "llama-attn-provider.h"

#include <algorithm>

namespace kvedge {

namespace {

constexpr int64_t ROWS    = 128;  // rows of a weight that are fetched or widened at a time
constexpr int64_t COLUMNS = 256;  // columns that one product reads from a packed weight

std::string name_of(const LayerShape & shape) { return "blk." + std::to_string(shape.il) + ".attn_output.weight"; }

// Converts n numbers of a ggml type to float32.
void widen(ggml_type type, const void * from, int64_t n, float * out) {
    if (type == GGML_TYPE_F32) {
        std::copy_n((const float *) from, n, out);
    } else {
        ggml_get_type_traits(type)->to_float(from, out, n);
    }
}

// Reads a weight row by row; a weight that the host cannot read is copied some rows at a time. out [ne1][ne0].
void read_rows(const ggml_tensor & w, int32_t n_threads, float * out) {
    const bool    here  = ggml_backend_buffer_is_host(w.buffer);
    const int64_t parts = (w.ne[1] + ROWS - 1) / ROWS;
    parallel_for(here ? n_threads : 1, (int32_t) parts, [&](int32_t part, int32_t) {
        const int64_t        first = part * ROWS, n = std::min(ROWS, w.ne[1] - first);
        std::vector<uint8_t> fetched(here ? 0 : (size_t) n * w.nb[1]);
        if (!here) {
            ggml_backend_tensor_get(&w, fetched.data(), (size_t) first * w.nb[1], fetched.size());
        }
        const uint8_t * rows = here ? (const uint8_t *) w.data + (size_t) first * w.nb[1] : fetched.data();
        for (int64_t r = 0; r < n; r++) {
            widen(w.type, rows + (size_t) r * w.nb[1], w.ne[0], out + (first + r) * w.ne[0]);
        }
    });
}

ggml_backend_dev_t device_of(const ggml_tensor & w) { return ggml_backend_buft_get_device(ggml_backend_buffer_get_type(w.buffer)); }

// Reads columns of a weight as its products with columns of the identity matrix.
class Probe {
  public:
    Probe(const ggml_tensor & w, int32_t n_threads) : transfer_(device_of(w)), builder_(8) {
        ggml_context * c = builder_.context.get();
        in_  = ggml_new_tensor_2d(c, GGML_TYPE_F32, w.ne[0], std::min(COLUMNS, w.ne[0]));
        out_ = ggml_mul_mat(c, const_cast<ggml_tensor *>(&w), in_);
        builder_.add(out_);
        transfer_.send<float>(in_, [this](float * to, int32_t) {
            std::fill_n(to, ggml_nelements(in_), 0.0f);
            for (int64_t col = 0; col < std::min(columns(), in_->ne[0] - first_); col++) {
                to[col * in_->ne[0] + first_ + col] = 1.0f;
            }
        });
        transfer_.fetch(out_);
        if (!transfer_.allocate() || !worker_.make_room(device_of(w), builder_.graph, n_threads)) {
            throw std::bad_alloc();
        }
    }

    int64_t columns() const { return in_->ne[1]; }

    // Returns [columns()][ne1], the weight's columns from `first` on. NULL: the device failed.
    const float * read(int64_t first) {
        first_ = first;
        transfer_.upload(1);
        const bool good = worker_.compute(builder_.graph);
        transfer_.download();
        return good ? transfer_.values(out_) : nullptr;
    }

  private:
    GraphTransfer transfer_;
    GraphBuilder  builder_;
    Worker        worker_;
    ggml_tensor * in_    = nullptr;
    ggml_tensor * out_   = nullptr;
    int64_t       first_ = 0;
};

// Reads a weight that is packed for the CPU's products: only such a product can read it. out [ne1][ne0].
void read_packed(const ggml_tensor & w, int32_t n_threads, float * out) {
    Probe      probe(w, n_threads);
    const auto across = (size_t) w.ne[0], down = (size_t) w.ne[1];
    for (int64_t first = 0; first < w.ne[0]; first += probe.columns()) {
        const float * columns = probe.read(first);
        if (!columns) {
            throw StageFailure(std::string("the packed weights of tensor ") + ggml_get_name(&w) + " cannot be read");
        }
        const auto n = (size_t) std::min(probe.columns(), w.ne[0] - first);
        for (size_t r = 0; r < down; r++) {
            for (size_t c = 0; c < n; c++) {
                out[r * across + (size_t) first + c] = columns[c * down + r];
            }
        }
    }
}

// Returns whether a weight is packed for the CPU's products: its buffer cannot be read.
bool is_packed(const ggml_tensor & w) {
    const ggml_backend_dev_t dev = device_of(w);
    return !ggml_backend_buffer_is_host(w.buffer) && dev && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

class ModelWeights : public OutputWeights {
  public:
    ModelWeights(const llama_model * model, const std::vector<LayerShape> & shapes) {
        for (const LayerShape & shape : shapes) {
            tensors_.push_back(llama_attn_provider_weight(model, name_of(shape).c_str()));
        }
    }

    std::string unusable(size_t layer, const LayerShape & shape) const override {
        const ggml_tensor * w = layer < tensors_.size() ? tensors_[layer] : nullptr;
        const std::string   name = name_of(shape);
        if (!w || !w->buffer) {
            return "the model has no tensor " + name;
        }
        if (w->ne[0] != (int64_t) shape.n_heads * shape.d_v || w->ne[2] != 1 || w->ne[3] != 1) {
            return name + " has rows of " + std::to_string(w->ne[0]) + " numbers, but its " + std::to_string(shape.n_heads) +
                   " heads need " + std::to_string(shape.n_heads * shape.d_v);
        }
        if (w->type != GGML_TYPE_F32 && !ggml_get_type_traits(w->type)->to_float) {
            return name + " has type " + ggml_type_name(w->type) + ", which kvedge cannot read";
        }
        return "";
    }

    int32_t width(size_t layer) const override { return (int32_t) tensors_[layer]->ne[1]; }

    void read(size_t layer, int32_t n_threads, float * out) const override {
        const ggml_tensor & w = *tensors_[layer];
        is_packed(w) ? read_packed(w, n_threads, out) : read_rows(w, n_threads, out);
    }

  private:
    std::vector<const ggml_tensor *> tensors_;  // one for each stored layer; NULL: the model has no such tensor
};

}  // namespace

std::shared_ptr<const OutputWeights> model_weights(const llama_model * model, const std::vector<LayerShape> & shapes) {
    return std::make_shared<ModelWeights>(model, shapes);
}

}  // namespace kvedge
