// Tensors that share one buffer on a device, and the graphs that kvedge itself runs on a device.

#pragma once

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace kvedge {

struct FreeGgml {
    void operator()(ggml_context * c) const { ggml_free(c); }
    void operator()(ggml_backend_buffer * b) const { ggml_backend_buffer_free(b); }
    void operator()(ggml_backend * b) const { ggml_backend_free(b); }
    void operator()(ggml_gallocr * a) const { ggml_gallocr_free(a); }
};

using GgmlContext = std::unique_ptr<ggml_context, FreeGgml>;

GgmlContext make_context(size_t bytes);  // returns a context for tensor descriptions, without data. Throws std::bad_alloc

class Tensors {
  public:
    Tensors() = default;
    explicit Tensors(size_t n);  // room for n tensors. Throws std::bad_alloc

    ggml_tensor * add(ggml_type type, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1);
    bool          allocate(ggml_backend_dev_t device);  // takes zeroed memory for all tensors. False: the device is out of memory
    uint64_t      bytes() const { return buffer_ ? ggml_backend_buffer_get_size(buffer_.get()) : 0; }

  private:
    GgmlContext                                    context_;
    std::unique_ptr<ggml_backend_buffer, FreeGgml> buffer_;
};

// Host memory for copies to and from a device: pinned memory if the device offers any, for full speed.
class Staging {
  public:
    uint8_t * room(ggml_backend_dev_t device, size_t bytes);  // returns `bytes` bytes; old content may be lost. Throws std::bad_alloc
    void      give_back() { *this = Staging(); }

  private:
    std::unique_ptr<ggml_backend_buffer, FreeGgml> pinned_;
    std::vector<uint8_t>                           plain_;
};

// View rows [d, slots, lists] as [d, slots * lists]. flat_as: as rows of another type with the same number of bytes.
ggml_tensor * flat(ggml_context * context, ggml_tensor * rows);
ggml_tensor * flat_as(ggml_context * context, ggml_tensor * rows, ggml_type type);

ggml_tensor * whole(ggml_context * context, ggml_tensor * x);  // x, copied if it is not contiguous
ggml_tensor * product(ggml_context * context, ggml_tensor * a, ggml_tensor * b);  // ggml_mul_mat with sums in f32
ggml_tensor * squares(ggml_context * context, ggml_tensor * rows);  // [1, ...] squared length of each row

// A graph of kvedge that is being built.
struct GraphBuilder {
    explicit GraphBuilder(size_t nodes);  // makes room for `nodes` tensors. Throws std::bad_alloc
    void add(ggml_tensor * result) { ggml_build_forward_expand(graph, result); }

    GgmlContext   context;
    ggml_cgraph * graph;
};

// Runs kvedge's graphs on one device, between the graphs of llama.cpp.
class Worker {
  public:
    // Takes memory for the results of a graph, enough for any smaller graph, too. False: the device is out of memory.
    bool     make_room(ggml_backend_dev_t device, ggml_cgraph * graph, int32_t n_threads);
    bool     compute(ggml_cgraph * graph);  // runs a graph after make_room for it. False: the device failed
    // Returns `bytes` bytes of device memory. Reuses the last small buffer if nobody else holds it. NULL: the device is out of memory.
    std::shared_ptr<ggml_backend_buffer> lend(ggml_backend_dev_t device, size_t bytes);
    void     give_back_memory() { memory_.reset(); }  // keeps the backend, which takes long to make on a GPU
    uint64_t bytes() const { return memory_ ? ggml_gallocr_get_buffer_size(memory_.get(), 0) : 0; }

    Staging staging;  // host memory for copies to and from the device

  private:
    std::shared_ptr<ggml_backend_buffer>    lent_;
    std::unique_ptr<ggml_backend, FreeGgml> backend_;
    std::unique_ptr<ggml_gallocr, FreeGgml> memory_;
};

// One Worker for each device. All sequences of a context use the same workers.
class Workers {
  public:
    std::shared_ptr<Worker> of(ggml_backend_dev_t device) {
        for (const auto & [known, worker] : all_) {
            if (known == device) {
                return worker;
            }
        }
        return all_.emplace_back(device, std::make_shared<Worker>()).second;
    }

  private:
    std::vector<std::pair<ggml_backend_dev_t, std::shared_ptr<Worker>>> all_;
};

// Makes a view depend on `node`, so that the node is in the graph and runs before readers of the view. A graph contains only
// nodes that its results depend on; a view computes nothing, so that the new source changes no value. node: may be NULL. Returns the view.
ggml_tensor * depend_on(ggml_tensor * view, ggml_tensor * node);

// Returns the name of the first operation of a graph that a device lacks; NULL: the device has all operations.
const char * lacking(ggml_backend_dev_t device, ggml_cgraph * graph);

// Returns whether GET_ROWS can copy rows bit for bit as i32 numbers: their bytes are a multiple of 4. Of other types it makes f32.
bool as_numbers(const ggml_tensor * rows);
// Copies rows `index` of `from` [d, rows] into `to`, whose number of rows equals the size of `index`. Converts types if they differ.
ggml_tensor * gathered(ggml_context * context, ggml_tensor * from, ggml_tensor * index, ggml_tensor * to);

int64_t operations_of(ggml_cgraph * graph);  // number of operations that compute; views do not count

// Makes an operation write its result to the memory of `to`, `offset` bytes behind its start.
void write_to(ggml_tensor * result, const ggml_tensor * to, size_t offset = 0);

// Copies the first n slots of every list from one tensor [d, slots, lists] to another tensor on the same device.
void copy_slots(ggml_tensor * from, ggml_tensor * to, int64_t n);

// Copies slots [first[i], end[i]) of `from` to the slots from starts[i] on of `to`, for each i.
void copy_regions(ggml_tensor * from, ggml_tensor * to, const std::vector<int32_t> & first, const std::vector<int32_t> & end,
                  const std::vector<int32_t> & starts);

}  // namespace kvedge
