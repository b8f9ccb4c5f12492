#include "device/inputs.h"

#include "system/threads.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

namespace kvedge {

// ---------------------------------------------------------------------------------------------------------
// Room

void Inputs::forget() {
    on_.clear();
    room_q_ = room_visible_ = room_recent_ = 0;
}

uint64_t Inputs::bytes() const {
    uint64_t n = 0;
    for (const DeviceTensors & on : on_) {
        n += on.held.bytes() + on.several.held.bytes();
    }
    return n;
}

bool Inputs::fit(const Incoming & incoming) const {
    return incoming.n <= room_q_ && slots_.visible(incoming.n) <= room_visible_ && incoming.window <= room_recent_;
}

bool Inputs::make(const Incoming & incoming) {
    on_.resize(slots_.devices.size());
    if (slots_.even || incoming.n == 1) {
        forget_several();
    } else if (!make_several(incoming.n)) {
        return false;
    }
    if (fit(incoming)) {
        return true;
    }
    const int32_t n = incoming.n, announced = incoming.announced;
    const int32_t shown = std::max(slots_.visible(announced), announced > n ? 0 : std::min(2 * room_visible_, slots_.slots_with_memory()));
    for (size_t i = 0; i < on_.size(); i++) {
        const DeviceTotals & of      = slots_.devices[i];
        const auto           spanned = (int64_t) of.spanned;
        Tensors              held(6);
        auto                 written = decltype(DeviceTensors::written)();
        for (auto & one : written) {
            one.index = held.add(GGML_TYPE_I64, (int64_t) of.entries * n + incoming.window);
            one.mask  = slots_.even ? held.add(GGML_TYPE_F16, (int64_t) shown * n) : nullptr;
            if (n == 1) {
                break;  // a graph of one token never runs while the next inputs are written
            }
        }
        ggml_tensor * const zeros = held.add(GGML_TYPE_F32, 1, 1, of.most);
        ggml_tensor * const spans = spanned > 0 ? held.add(GGML_TYPE_I32, index_at(of) + 2 * spanned) : nullptr;
        room_q_ = room_visible_ = 0;
        if (!held.allocate(of.device)) {
            return slots_.refuse(of.device);
        }
        on_[i].held    = std::move(held);
        on_[i].written = written;
        on_[i].zeros   = zeros;
        on_[i].spans   = spans;
    }
    room_q_       = n;
    room_visible_ = shown;
    room_recent_  = incoming.window;
    slots_.change();
    return true;
}

// Divides a group into parts, and adds their columns to `columns`. A group of lists is one part, as its KV heads have similar lengths.
// Regions have up to MOST parts, to keep the mask of each part small.
static void plan_parts(Group & group, int32_t n, size_t & columns) {
    constexpr int32_t STEP  = 256;       // attention kernels need a multiple of STEP columns
    constexpr int64_t MASK  = 32 << 20;  // bytes of the mask of a part
    constexpr int64_t MOST  = 4;         // parts of a layer: each part costs several kernel launches
    const size_t      heads = group.heads.size();
    const auto        wide  = [&](size_t first, size_t end) {
        int32_t most = 0;
        for (size_t i = first; i < end; i++) {
            most = std::max(most, group.n_rows(i));
        }
        return (n + most + STEP - 1) / STEP * STEP;
    };
    const int64_t mask  = (int64_t) sizeof(ggml_fp16_t) * wide(0, heads) * n * (int64_t) heads;
    const size_t  parts = group.regions ? (size_t) std::clamp<int64_t>((mask + MASK - 1) / MASK, 1, MOST) : 1;
    const size_t  each  = (heads + parts - 1) / parts;
    group.parts.clear();
    for (size_t first = 0; first < heads; first += each) {
        const size_t end = std::min(first + each, heads);
        group.parts.push_back({ first, end - first, wide(first, end), columns });
        columns += (end - first) * (size_t) group.parts.back().columns;
    }
}

bool Inputs::make_several(int32_t n) {
    std::vector<size_t>  columns(on_.size(), 0);
    std::vector<int32_t> most(on_.size(), 0);
    for (DeviceLayer & layer : slots_.layers) {
        for (Group & group : layer.groups) {
            plan_parts(group, n, columns[layer.on]);
            for (const SidePart & part : group.parts) {
                most[layer.on] = std::max(most[layer.on], part.columns);
            }
        }
    }
    slots_.change();  // parts differ from graph to graph
    for (size_t i = 0; i < on_.size(); i++) {
        SideBySide & x = on_[i].several;
        x.held         = Tensors(3);
        x.places       = x.held.add(GGML_TYPE_I32, (int64_t) columns[i]);
        x.biases       = x.held.add(GGML_TYPE_F16, (int64_t) columns[i]);
        x.fresh        = x.held.add(GGML_TYPE_F16, most[i], n);
        if (!x.held.allocate(slots_.devices[i].device)) {
            return slots_.refuse(slots_.devices[i].device);
        }
    }
    return true;
}

// Frees the inputs of several tokens, and updates the masks on the device, which single tokens need.
void Inputs::forget_several() {
    for (DeviceTensors & on : on_) {
        if (on.several.places) {
            on.several = SideBySide();
            slots_.change();
        }
    }
    for (DeviceLayer & layer : slots_.layers) {
        for (Group & group : layer.groups) {
            if (group.stale) {
                group.write_mask();
                group.stale = false;
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Values

void Inputs::write(int32_t n, bool causal, std::vector<std::vector<int64_t>> index, const std::vector<int64_t> & ring) {
    n_    = n;
    turn_ = n > 1 ? 1 - turn_ : 0;
    for (size_t i = 0; i < on_.size(); i++) {
        const auto    before  = (int32_t) index[i][0];
        const size_t  spanned = slots_.devices[i].spanned;
        const auto &  to      = on_[i].written[turn_];
        if (n == 1 && spanned > 0) {
            write_spans(i, index[i]);
        }
        index[i].insert(index[i].end(), ring.begin(), ring.end());
        if (n > 1 || spanned < index[i].size()) {  // else write_spans() has written all of them
            ggml_backend_tensor_set(to.index, index[i].data(), 0, index[i].size() * sizeof(int64_t));
        }
        if (slots_.even) {
            write_even_mask(to, before, causal);
        }
    }
    if (!slots_.even && n > 1) {
        write_several(causal);
    }
}

// Writes the mask of even rows: each token sees the `before` older slots, and the new rows up to its own (causal) or all new rows.
void Inputs::write_even_mask(const Written & to, int32_t before, bool causal) const {
    constexpr size_t LARGE = 4 << 20;  // bytes of a mask from which several threads are worth their start
    const auto       shown = (size_t) slots_.visible(), bytes = shown * (size_t) n_ * sizeof(ggml_fp16_t);
    const std::unique_ptr<ggml_fp16_t[]> mask(new ggml_fp16_t[shown * (size_t) n_]);
    parallel_for(bytes < LARGE ? 1 : slots_.n_threads, n_, [&](int32_t t, int32_t) {
        ggml_fp16_t * const row  = mask.get() + (size_t) t * shown;
        const auto          seen = (size_t) (before + (causal ? t + 1 : n_));
        std::fill_n(row, seen, ggml_fp32_to_fp16(0.0f));
        std::fill(row + seen, row + shown, ggml_fp32_to_fp16(-INFINITY));
    });
    ggml_backend_tensor_set(to.mask, mask.get(), 0, bytes);
}

// Writes the spans of a device for a graph of one token. index: slots of the token's rows, for all KV heads on the device.
void Inputs::write_spans(size_t in, const std::vector<int64_t> & index) {
    const DeviceTotals & on  = slots_.devices[in];
    const auto           end = (size_t) index_at(on);
    std::vector<int32_t> all((size_t) on_[in].spans->ne[0], 0);
    for (const size_t l : on.layers) {
        for (const Group & group : slots_.layers[l].groups) {
            for (size_t i = 0; i < group.heads.size() && group.regions; i++) {
                int32_t * const span = all.data() + (group.span + i) * (size_t) on.span;
                span[0]              = group.first[i];
                span[1]              = group.used[i] - group.first[i];
                std::memcpy(all.data() + end + 2 * (group.span + i), &index[group.entry + i], sizeof(int64_t));
            }
        }
    }
    ggml_backend_tensor_set(on_[in].spans, all.data(), 0, all.size() * sizeof(int32_t));
}

// Writes the places and biases of a part's columns. The last n_ rows of a head are the new rows, whose columns come first.
void Inputs::write_part(const Group & group, const SidePart & part, int32_t * places, ggml_fp16_t * biases) const {
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY), seen = ggml_fp32_to_fp16(0.0f);
    for (size_t i = part.first; i < part.first + part.heads; i++, places += part.columns, biases += part.columns) {
        auto slots = group.slots_of(i);
        std::rotate(slots.begin(), slots.end() - n_, slots.end());
        const auto &  came  = group.biases[i];
        const int32_t first = group.first[i] + (group.regions ? 0 : (int32_t) i * group.slots), end = first + (int32_t) came.size();
        for (size_t j = 0; j < slots.size(); j++) {
            const bool old = slots[j] >= first && slots[j] < end && j >= (size_t) n_;
            places[j]      = slots[j];
            biases[j]      = old ? ggml_fp32_to_fp16(came[(size_t) (slots[j] - first)]) : seen;
        }
        std::fill(places + slots.size(), places + part.columns, places[0]);
        std::fill(biases + slots.size(), biases + part.columns, hidden);
    }
}

void Inputs::write_several(bool causal) {
    constexpr size_t  MANY   = 1 << 20;  // columns from which several threads are worth their start
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY), seen = ggml_fp32_to_fp16(0.0f);
    for (size_t in = 0; in < on_.size(); in++) {
        const SideBySide &       x = on_[in].several;
        const auto &             layers = slots_.devices[in].layers;
        const auto               n = (size_t) n_, width = (size_t) x.fresh->ne[0], columns = (size_t) x.places->ne[0];
        std::vector<int32_t>     places(columns);
        std::vector<ggml_fp16_t> biases(columns), fresh(width * n, seen);
        parallel_for(columns < MANY ? 1 : slots_.n_threads, (int32_t) layers.size(), [&](int32_t l, int32_t) {
            for (const Group & group : slots_.layers[layers[(size_t) l]].groups) {
                for (const SidePart & part : group.parts) {
                    write_part(group, part, places.data() + part.at, biases.data() + part.at);
                }
            }
        });
        for (size_t t = 0; t < n && causal; t++) {
            std::fill_n(fresh.begin() + (std::ptrdiff_t) (t * width + t + 1), n - t - 1, hidden);
        }
        ggml_backend_tensor_set(x.places, places.data(), 0, ggml_nbytes(x.places));
        ggml_backend_tensor_set(x.biases, biases.data(), 0, ggml_nbytes(x.biases));
        ggml_backend_tensor_set(x.fresh, fresh.data(), 0, ggml_nbytes(x.fresh));
    }
}

}  // namespace kvedge
