// What the host writes for each graph over rows on devices: the slots of the new rows, masks, and the spans of heads.

#pragma once

#include "device/slots.h"

#include <array>
#include <cstdint>
#include <vector>

namespace kvedge {

class Inputs {
  public:
    // Of each column of all parts on a device, while several tokens are read (several.cpp): the place of its row, and its bias,
    // or -inf.
    struct SideBySide {
        Tensors       held;
        ggml_tensor * places = nullptr;  // [columns] i32
        ggml_tensor * biases = nullptr;  // [columns] f16
        ggml_tensor * fresh  = nullptr;  // [most columns of a part, n] f16: which of the new rows a token sees
    };
    struct Written {
        ggml_tensor * index = nullptr;  // [entries * n + window] i64: slots of the rows, then places in the window
        ggml_tensor * mask  = nullptr;  // [visible * n] f16, where heads are even
    };
    // Of one device.
    struct On {
        Tensors                held;
        std::array<Written, 2> written;          // by turns, so that one is written while the graph that reads the other runs
        ggml_tensor *          zeros = nullptr;  // [1, 1, most] f32
        ggml_tensor *          spans = nullptr;  // [span, spanned] i32, then [spanned] i64, the slots of one token's rows
        SideBySide             several;
    };

    explicit Inputs(Slots & slots) : slots_(slots) {}

    bool fit(const Incoming & incoming) const;  // there is room for them
    // Room for them; for all tokens that were announced, or else for twice as many slots as there were. False: a device has no
    // memory. Throws std::bad_alloc.
    bool make(const Incoming & incoming);
    // For a graph of n tokens, whose slots are index (Slots::take) and whose places in the window are ring.
    void write(int32_t n, bool causal, std::vector<std::vector<int64_t>> index, const std::vector<int64_t> & ring);
    void forget();

    const On &      of(const DeviceLayer & layer) const { return on_[layer.on]; }
    const Written & written(const DeviceLayer & layer) const { return on_[layer.on].written[turn_]; }
    int32_t         n() const { return n_; }  // tokens of the graph
    uint64_t        turn() const { return turn_; }
    uint64_t        bytes() const;

  private:
    bool make_several(int32_t n);
    void forget_several();
    void write_part(const Group & group, const SidePart & part, int32_t * places, ggml_fp16_t * biases) const;
    void write_several(bool causal);
    void write_spans(size_t device, const std::vector<int64_t> & index);
    void write_even_mask(const Written & to, int32_t before, bool causal) const;

    Slots &         slots_;
    std::vector<On> on_;
    int32_t         room_q_ = 0, room_visible_ = 0, room_recent_ = 0;
    int32_t         n_    = 0;
    uint64_t        turn_ = 0;  // which of the inputs the graph reads
};

// Where the spans of a device end and the index begins: 64 bits wide.
inline int64_t index_at(const LayersOn & on) { return (on.span * (int64_t) on.spanned + 1) / 2 * 2; }

}  // namespace kvedge
