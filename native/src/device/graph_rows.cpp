#include "device/graph_rows.h"

#include <algorithm>

namespace kvedge {

// Marks the masks of uneven heads as out of date, after rows were added or removed without a graph that updates the masks.
static void outdate_masks(Slots & slots) {
    for (DeviceLayer & layer : slots.layers) {
        for (Group & group : layer.groups) {
            group.stale = group.stale || !slots.even;
        }
    }
}

bool GraphRows::load(Store & from, int32_t n_threads) {
    slots_.n_threads = n_threads;
    return slots_.load(from);
}

bool GraphRows::fetch(Store & to, int32_t n_threads) {
    slots_.n_threads = n_threads;
    return slots_.fetch(to);
}

bool GraphRows::append(const Store & from, int32_t n, int32_t n_threads) {
    slots_.n_threads = n_threads;
    if (!slots_.grow({ n, n, 0, {}, 0, 1 })) {
        return false;
    }
    slots_.take(n);
    send_last(slots_, from, n);
    outdate_masks(slots_);
    return true;
}

bool GraphRows::make_plain(int32_t n_threads) {
    slots_.n_threads = n_threads;
    return slots_.make_plain();
}

uint64_t GraphRows::bytes() const { return slots_.bytes() + inputs_.bytes() + queries.bytes() + sums.bytes(); }

bool GraphRows::may_follow(const Incoming & incoming) const {
    const bool fits = slots_.fits(incoming) && inputs_.fit(incoming);
    return slots_.even && incoming.n > 1 && fits && queries.keeps(incoming) && sums.keeps(incoming);
}

bool GraphRows::reserve(const Incoming & incoming, int32_t n_threads) {
    slots_.n_threads = n_threads;
    return slots_.grow(incoming) && inputs_.make(incoming) && queries.make(incoming) && sums.make(incoming);
}

void GraphRows::enter(int32_t n, bool causal) {
    auto       index  = slots_.take(n);
    const auto places = queries.enter(n);
    sums.enter();
    inputs_.write(n, causal, std::move(index), places);
}

void GraphRows::take_back(int32_t n) {
    for (DeviceLayer & layer : slots_.layers) {
        for (Group & group : layer.groups) {
            for (int32_t & end : group.used) {
                end -= n;
            }
        }
    }
    outdate_masks(slots_);
}

void GraphRows::drop(size_t l, int32_t head, int32_t row) {
    for (Group & group : slots_.layers[l].groups) {
        const auto at = std::lower_bound(group.heads.begin(), group.heads.end(), head);
        if (at != group.heads.end() && *at == head) {
            group.drop((size_t) (at - group.heads.begin()), row);
        }
    }
}

DeviceRows::Outcome GraphRows::fail(Outcome outcome, ggml_backend_dev_t device, const char * what, const char * which) {
    problem_.set({ "device ", ggml_backend_dev_name(device), " ", what, which });
    if (outcome == Outcome::full) {
        slots_.refuse(device);
    }
    return outcome;
}

}  // namespace kvedge
