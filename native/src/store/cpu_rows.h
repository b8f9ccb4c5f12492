// Rows in the host's memory. Uniform: keys [Hkv][capacity][d_k], then values [Hkv][capacity][d_v], of a plain type; heads of
// loose rows have them as their second areas. Ragged: store/ragged.h.

#pragma once

#include "store/backend.h"
#include "system/pages.h"
#include "store/ragged.h"

namespace kvedge {

class CpuRows final : public LayerRows {
  public:
    CpuRows(const LayerShape & shape, const Storage & storage, int32_t capacity);
    CpuRows(const LayerShape & shape, const Storage & storage, std::vector<RaggedHead> heads);

    std::unique_ptr<LayerRows> clone() const override { return std::make_unique<CpuRows>(*this); }

    bool     take() override;
    void     give_back() override { memory_ = Pages(); }
    void     clear() noexcept override;
    uint64_t bytes() const override { return memory_.size(); }
    uint64_t extent() const override { return extent_; }
    uint64_t index_bytes() const override;

    void view(int32_t head, std::vector<Segment> & out) const override {
        each_segment(head, [&](const Segment & s) { out.push_back(s); });
    }
    void add(int32_t n) override;
    void fill(int32_t head, int32_t first, const std::vector<Segment> & from) override;
    void keep(const std::vector<int32_t> & rows) override;
    void loosen() override;
    void set_loose(int32_t head, int32_t n) override;
    void write(int32_t head, int32_t first, int32_t n, const float * k, const float * v) override;
    void gather(int32_t head, const std::vector<int32_t> & kept, const std::vector<Segment> & from) override;
    void keep_flagged(int32_t head, const uint8_t * flags, int32_t end) override;
    void drop(int32_t head, int32_t row) override;
    void save_counts(int32_t head, Sink & out) const override;
    void save(Sink & out) const override;
    bool load_counts(int32_t head, int32_t length, Reader & in) override;
    bool load(Reader & in) override;

    // Of uniform rows.
    uint8_t * k_row(int32_t head, int32_t row) { return memory_.data() + k_at(head, row); }
    uint8_t * v_row(int32_t head, int32_t row) { return memory_.data() + v_at(head, row); }

    template <class F> void each_segment(int32_t head, const F & visit) const {
        if (!heads_.empty()) {
            each_ragged(memory_.data(), heads_[(size_t) head], shape_, storage_, visit);
        } else if (n_ > 0) {
            const Storage plain = storage_.plain();
            visit(Segment{ { memory_.data() + k_at(head, 0), row_k(shape_, plain.k), plain.k },
                           { memory_.data() + v_at(head, 0), row_v(shape_, plain.v), plain.v },
                           n_ });
        }
    }

    const LayerShape & shape() const { return shape_; }
    const Storage &    storage() const { return storage_; }
    const uint8_t *    data() const { return memory_.data(); }
    const RaggedHead * head(int32_t h) const { return heads_.empty() ? nullptr : &heads_[(size_t) h]; }  // NULL: uniform
    uint8_t *          data() { return memory_.data(); }

  private:
    size_t k_at(int32_t head, int32_t row) const {
        return ((size_t) head * (size_t) capacity_ + (size_t) row) * row_k(shape_, storage_.plain().k);
    }
    size_t v_at(int32_t head, int32_t row) const {
        const size_t keys = (size_t) shape_.n_heads_kv * (size_t) capacity_ * row_k(shape_, storage_.plain().k);
        return keys + ((size_t) head * (size_t) capacity_ + (size_t) row) * row_v(shape_, storage_.plain().v);
    }

    LayerShape              shape_;
    Storage                 storage_;
    bool                    ragged_;
    int32_t                 capacity_ = 0, n_ = 0;  // of uniform rows: room, and rows of the block
    size_t                  extent_   = 0;
    Pages                   memory_;
    std::vector<RaggedHead> heads_;  // [Hkv] of loose and of ragged rows, else empty
};

}  // namespace kvedge
