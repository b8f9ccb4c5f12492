// The graph inputs that the host writes for each ubatch: slots of new rows, masks, and spans of KV heads.

#pragma once

#include "device/slots.h"

#include <array>
#include <cstdint>
#include <vector>

namespace kvedge {

class Inputs {
  public:
    // Inputs of a device while a ubatch of several tokens attends over heads of different lengths (several.cpp). A column is a
    // row that all these tokens attend to, or padding.
    struct SideBySide {
        Tensors       held;
        ggml_tensor * places = nullptr;  // [columns] i32: place of the column's row
        ggml_tensor * biases = nullptr;  // [columns] f16: bias of the row, -inf for padding
        ggml_tensor * fresh  = nullptr;  // [most columns of a part, n] f16: -inf hides a new row from a token
    };
    struct Written {
        ggml_tensor * index = nullptr;  // [entries * n + window] i64: slots of the new rows, then places of kept queries in the ring
        ggml_tensor * mask  = nullptr;  // [visible * n] f16, only if KV heads are even
    };
    // The inputs of one device.
    struct DeviceTensors {
        Tensors                held;
        std::array<Written, 2> written;          // used in turn: the host writes one while a graph reads the other
        ggml_tensor *          zeros = nullptr;  // [1, 1, most] f32
        ggml_tensor *          spans = nullptr;  // [span, spanned] i32, then [spanned] i64: the slots of one token's rows
        SideBySide             several;
    };

    explicit Inputs(Slots & slots) : slots_(slots) {}

    bool fit(const Incoming & incoming) const;  // whether the inputs have room for these tokens
    // Makes room: for all announced tokens (Incoming::announced), else for up to twice as many slots as before. False: a device is out
    // of memory. Throws std::bad_alloc.
    bool make(const Incoming & incoming);
    // Writes the inputs of a graph of n tokens. index: slots of the new rows (Slots::take). ring: places of kept queries (Ring::enter).
    void write(int32_t n, bool causal, std::vector<std::vector<int64_t>> index, const std::vector<int64_t> & ring);
    void forget();

    const DeviceTensors & of(const DeviceLayer & layer) const { return on_[layer.on]; }
    const Written &       written(const DeviceLayer & layer) const { return on_[layer.on].written[turn_]; }
    int32_t               n() const { return n_; }  // tokens of the current graph
    uint64_t              turn() const { return turn_; }
    uint64_t              bytes() const;

  private:
    bool make_several(int32_t n);
    void forget_several();
    void write_part(const Group & group, const SidePart & part, int32_t * places, ggml_fp16_t * biases) const;
    void write_several(bool causal);
    void write_spans(size_t device, const std::vector<int64_t> & index);
    void write_even_mask(const Written & to, int32_t before, bool causal) const;

    Slots &                    slots_;
    std::vector<DeviceTensors> on_;
    int32_t                    room_q_ = 0, room_visible_ = 0, room_recent_ = 0;
    int32_t                    n_    = 0;
    uint64_t                   turn_ = 0;  // which of DeviceTensors::written the graph reads
};

// Returns the offset, in i32 numbers, of the i64 slots behind the spans of a device. The offset is even, to align the slots.
inline int64_t index_at(const DeviceTotals & on) { return (on.span * (int64_t) on.spanned + 1) / 2 * 2; }

}  // namespace kvedge
