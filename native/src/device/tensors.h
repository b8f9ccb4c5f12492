// Tensors that share one buffer on a device, and graphs of our own there.

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

GgmlContext make_context(size_t bytes);  // for descriptions of tensors, not for data. Throws std::bad_alloc

class Tensors {
  public:
    Tensors() = default;
    explicit Tensors(size_t n);  // room for n tensors. Throws std::bad_alloc

    ggml_tensor * add(ggml_type type, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1);
    bool          allocate(ggml_backend_dev_t device);  // memory for all of them, all zero. False: there is none
    uint64_t      bytes() const { return buffer_ ? ggml_backend_buffer_get_size(buffer_.get()) : 0; }

  private:
    GgmlContext                                    context_;
    std::unique_ptr<ggml_backend_buffer, FreeGgml> buffer_;
};

// Memory of the host from which a device copies, at its full speed where it has such memory.
class Staging {
  public:
    uint8_t * room(ggml_backend_dev_t device, size_t bytes);  // what lay there is lost where it grows. Throws std::bad_alloc
    void      give_back() { *this = Staging(); }

  private:
    std::unique_ptr<ggml_backend_buffer, FreeGgml> pinned_;
    std::vector<uint8_t>                           plain_;
};

// Rows of any type, the first two dimensions of a view: as [d, rows], or as rows of another type with as many bytes.
ggml_tensor * flat(ggml_context * context, ggml_tensor * rows);
ggml_tensor * flat_as(ggml_context * context, ggml_tensor * rows, ggml_type type);

ggml_tensor * whole(ggml_context * context, ggml_tensor * x);  // contiguous
ggml_tensor * product(ggml_context * context, ggml_tensor * a, ggml_tensor * b);  // ggml_mul_mat, added up in f32
ggml_tensor * squares(ggml_context * context, ggml_tensor * rows);  // [1, ...] of the lengths of rows

// A graph of ours that is being built.
struct Sketch {
    explicit Sketch(size_t nodes);  // room for so many tensors. Throws std::bad_alloc
    void add(ggml_tensor * result) { ggml_build_forward_expand(graph, result); }

    GgmlContext   context;
    ggml_cgraph * graph;
};

// Runs graphs of ours on a device, between those of llama.cpp.
class Worker {
  public:
    // Memory for the results of a graph, and for those of any smaller one. False: the device has none.
    bool     make_room(ggml_backend_dev_t device, ggml_cgraph * graph, int32_t n_threads);
    bool     compute(ggml_cgraph * graph);  // one that there is room for. False: the device failed
    // Some memory of the device; what the last one had may be used again when that is done with it. NULL: there is none.
    std::shared_ptr<ggml_backend_buffer> lend(ggml_backend_dev_t device, size_t bytes);
    void     give_back_memory() { memory_.reset(); }  // what it takes to run graphs stays: on a GPU it takes long to make
    uint64_t bytes() const { return memory_ ? ggml_gallocr_get_buffer_size(memory_.get(), 0) : 0; }

    Staging staging;  // of whoever sends or fetches something

  private:
    std::shared_ptr<ggml_backend_buffer>    lent_;
    std::unique_ptr<ggml_backend, FreeGgml> backend_;
    std::unique_ptr<ggml_gallocr, FreeGgml> memory_;
};

// Of each device the one that all sequences of a context use in turn.
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

// Makes a view wait for a node that no operation reads, so that the node is in the graph, and run before what reads the view:
// a graph holds what its results' sources lead to, and a view computes nothing from them. node: may be NULL. Returns the view.
ggml_tensor * after(ggml_tensor * view, ggml_tensor * node);

// The first operation of a graph that a device does not have; NULL: it has all of them.
const char * lacking(ggml_backend_dev_t device, ggml_cgraph * graph);

// Whether rows can be copied bit for bit: as whole numbers; all others GET_ROWS makes f32 of.
bool as_numbers(const ggml_tensor * rows);
// Rows of `from` [d, rows] into all of `to`.
ggml_tensor * gathered(ggml_context * context, ggml_tensor * from, ggml_tensor * index, ggml_tensor * to);

int64_t operations_of(ggml_cgraph * graph);  // that a device runs

// The result of an operation goes there, not into memory that the graph gets.
void write_to(ggml_tensor * result, const ggml_tensor * to, size_t offset = 0);

// The first n slots of every head, from one tensor [d, slots, heads] to another, on their device.
void copy_slots(ggml_tensor * from, ggml_tensor * to, int64_t n);

// Slots [first[i], end[i]) of a list, to those from starts[i] on of another.
void copy_regions(ggml_tensor * from, ggml_tensor * to, const std::vector<int32_t> & first, const std::vector<int32_t> & end,
                  const std::vector<int32_t> & starts);

}  // namespace kvedge
