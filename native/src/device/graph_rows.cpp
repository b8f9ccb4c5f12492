#include "device/graph_rows.h"

#include "device/groups.h"
#include "system/threads.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <stdexcept>

namespace kvedge {

namespace {

constexpr int32_t STEP = 256;  // slots by which what a graph looks at grows, so that it serves many tokens

int32_t rounded(int32_t n) { return (n + STEP - 1) / STEP * STEP; }

}  // namespace

GraphRows::GraphRows(const std::vector<LayerShape> & shapes, const std::vector<ggml_backend_dev_t> & devices, const Form & form,
                     uint64_t & stamps)
    : shapes_(&shapes), form_(form), stamps_(&stamps), layers_(shapes.size()) {
    for (size_t l = 0; l < layers_.size(); l++) {
        layers_[l].device = devices[l];
    }
}

const GraphRows::Group & GraphRows::group_of(size_t l, int32_t head, size_t & at) const {
    for (const Group & group : layers_[l].groups) {
        const auto it = std::find(group.heads.begin(), group.heads.end(), head);
        if (it != group.heads.end()) {
            at = (size_t) (it - group.heads.begin());
            return group;
        }
    }
    throw std::logic_error("a head lies in no group");
}

std::vector<int32_t> GraphRows::places_of(size_t l, int32_t head) const {
    size_t               at    = 0;
    const Group &        group = group_of(l, head, at);
    std::vector<int32_t> out   = group.order.size() > at && group.ordered ? group.order[at] : std::vector<int32_t>();
    if (!group.ordered) {
        out.resize((size_t) group.used[at]);
        std::iota(out.begin(), out.end(), 0);
    }
    for (int32_t & slot : out) {
        slot += (int32_t) group.list(at) * group.slots;
    }
    return out;
}

bool GraphRows::refuse(ggml_backend_dev_t device) {
    full_device_ = ggml_backend_dev_name(device);
    return false;
}

// Takes no memory: it is asked for when a compression is over, and nothing may fail.
uint64_t GraphRows::bytes() const {
    uint64_t   n     = 0;
    const auto holds = [](const Layer & layer, const Tensors * held) {
        return std::any_of(layer.groups.begin(), layer.groups.end(), [&](const Group & group) { return group.held.get() == held; });
    };
    for (auto layer = layers_.begin(); layer != layers_.end(); ++layer) {
        n += layer->order.bytes();
        for (auto group = layer->groups.begin(); group != layer->groups.end(); ++group) {
            const Tensors * held  = group->held.get();
            const bool      known = std::any_of(layer->groups.begin(), group, [&](const Group & g) { return g.held.get() == held; }) ||
                               std::any_of(std::make_reverse_iterator(layer), layers_.rend(), [&](const Layer & l) { return holds(l, held); });
            n += held && !known ? held->bytes() : 0;
        }
    }
    for (const Inputs & inputs : inputs_) {
        n += inputs.held.bytes() + inputs.window.bytes() + inputs.sums.bytes() + inputs.several.held.bytes() + inputs.worker.bytes();
    }
    return n;
}

// ---------------------------------------------------------------------------------------------------------
// Room on the devices

// For so many slots, in memory that `held` is yet to be given.
GraphRows::Room GraphRows::room_for(size_t l, const Group & group, int32_t slots, const std::shared_ptr<Tensors> & held) const {
    const LayerShape & shape = (*shapes_)[l];
    const auto         heads = (int64_t) group.heads.size(), lists = heads / group.together;
    const bool         picks = layers_[l].joined || heads < shape.n_heads_kv, biased = form_.dropping || !group.biases[0].empty();
    Room               room;
    room.held  = held;
    room.k     = held->add(ggml_type_of(form_.storage.k), shape.d_k, slots, lists);
    room.v     = held->add(ggml_type_of(form_.storage.v), shape.d_v, slots, lists);
    room.mask  = even_ || (group.regions && !biased) ? nullptr :
                 group.regions                       ? held->add(GGML_TYPE_F16, slots) :
                                                       held->add(GGML_TYPE_F16, slots, group.queries, heads);
    room.pick  = picks ? held->add(GGML_TYPE_I32, heads) : nullptr;
    room.slots = slots;
    return room;
}

// What the host knows, into tensors that have memory.
void GraphRows::fill(const Group & group) {
    if (group.mask) {
        write_mask(group);
    }
    if (group.pick) {
        ggml_backend_tensor_set(group.pick, group.heads.data(), 0, group.heads.size() * sizeof(int32_t));
    }
}

// starts: where its regions begin then.
bool GraphRows::make_group(size_t l, Group & group, int32_t slots, const std::vector<int32_t> & starts) {
    Room room = room_for(l, group, slots, std::make_shared<Tensors>(ROOM_TENSORS));
    if (!room.held->allocate(layers_[l].device)) {
        return refuse(layers_[l].device);
    }
    if (group.k && group.regions) {
        copy_regions(group.k, room.k, group.first, group.used, starts);
        copy_regions(group.v, room.v, group.first, group.used, starts);
        group.move_to(starts);
    } else if (group.k) {
        copy_slots(group.k, room.k, group.most_used());
        copy_slots(group.v, room.v, group.most_used());
    }
    static_cast<Room &>(group) = std::move(room);
    fill(group);
    stamp_ = ++*stamps_;
    return true;
}

// The first of a sequence's: layers share buffers, since a device takes its time for each, but not all of them one, so that
// some go when the first layers get smaller.
bool GraphRows::make_groups(const std::vector<Unmade> & groups) {
    constexpr size_t BUFFERS = 4;  // for the layers of a device
    for (const Inputs & inputs : inputs_) {
        std::vector<Unmade> of;
        std::copy_if(groups.begin(), groups.end(), std::back_inserter(of), [&](const Unmade & x) { return layers_[x.layer].device == inputs.device; });
        const size_t share = (of.size() + BUFFERS - 1) / BUFFERS;
        for (size_t from = 0; from < of.size(); from += share) {
            const size_t end  = std::min(from + share, of.size());
            const auto   held = std::make_shared<Tensors>(ROOM_TENSORS * (end - from));
            std::vector<Room> rooms;
            for (size_t i = from; i < end; i++) {
                rooms.push_back(room_for(of[i].layer, *of[i].group, of[i].slots, held));
            }
            if (!held->allocate(inputs.device)) {
                return refuse(inputs.device);
            }
            for (size_t i = from; i < end; i++) {
                static_cast<Room &>(*of[i].group) = std::move(rooms[i - from]);
                fill(*of[i].group);
            }
            stamp_ = ++*stamps_;
        }
    }
    return true;
}

// What every head may look at so far.
void GraphRows::write_mask(const Group & group) {
    if (group.regions) {
        write_biases(group);
        return;
    }
    const ggml_fp16_t        hidden = ggml_fp32_to_fp16(-INFINITY), seen = ggml_fp32_to_fp16(0.0f);
    const auto               queries = (size_t) group.queries, slots = (size_t) group.slots;
    std::vector<ggml_fp16_t> mask(group.heads.size() * queries * slots, hidden);
    for (size_t i = 0; i < group.heads.size(); i++) {
        const auto head = mask.begin() + (std::ptrdiff_t) (i * queries * slots);
        std::fill_n(head, group.ordered ? 0 : group.used[group.list(i)], seen);
        for (const int32_t slot : group.order[i]) {
            head[slot] = seen;
        }
        const auto & biases = group.biases[i];
        for (size_t row = 0; row < biases.size(); row++) {
            auto & at = head[group.first[i] + (std::ptrdiff_t) row];
            at        = at == seen ? ggml_fp32_to_fp16(biases[row]) : hidden;
        }
        for (size_t g = 1; g < queries; g++) {
            std::copy_n(head, slots, head + (std::ptrdiff_t) (g * slots));
        }
    }
    ggml_backend_tensor_set(group.mask, mask.data(), 0, mask.size() * sizeof(ggml_fp16_t));
}

// ---------------------------------------------------------------------------------------------------------
// Room for tokens, and the inputs of a graph

void GraphRows::plan_inputs() {
    for (size_t l = 0; l < layers_.size(); l++) {
        Layer & layer = layers_[l];
        if (!layer.device) {
            continue;
        }
        auto it = std::find_if(inputs_.begin(), inputs_.end(), [&](const Inputs & i) { return i.device == layer.device; });
        if (it == inputs_.end()) {
            it = inputs_.insert(it, Inputs{});
            it->device  = layer.device;
            it->entries = even_ ? 1 : 0;
        }
        layer.inputs = (size_t) (it - inputs_.begin());
        layer.query_at = it->query;
        layer.head_at  = it->heads;
        it->query += (size_t) (*shapes_)[l].d_k * (size_t) (*shapes_)[l].n_heads;
        it->heads += (size_t) (*shapes_)[l].n_heads_kv;
        for (Group & group : layer.groups) {
            group.entry = even_ ? 0 : it->entries;
            group.span  = it->spanned;
            if (group.regions) {
                it->spanned += group.heads.size();
                it->span = std::max<int64_t>(it->span, 2 + (*shapes_)[l].n_heads / (*shapes_)[l].n_heads_kv);
            }
            it->entries += even_ ? 0 : group.heads.size();
            it->most = std::max(it->most, (int32_t) group.heads.size() * group.queries);
        }
    }
}

int32_t GraphRows::visible_after(int32_t n) const {
    for (const Layer & layer : layers_) {
        if (layer.device && even_) {
            const Group & group = layer.groups[0];
            return std::min(group.slots, rounded(group.most_used() + n));
        }
    }
    return 0;
}

int32_t GraphRows::visible() const { return visible_after(0); }

int32_t GraphRows::slots_shown() const { return visible_after(INT32_MAX / 2); }

int32_t GraphRows::slots_wanted(const Group & group, const Incoming & incoming) const {
    const int32_t held = group.most_used(), together = group.together, need = held + incoming.n * together;
    if (need <= group.slots) {
        return group.slots;
    }
    if (incoming.follow > incoming.n) {
        return slots_for(held + incoming.follow * together, together);
    }
    // in steps that keep the cost of a token constant
    const int32_t more = even_ && incoming.n > 1 ? rounded(need + need / 2) : slots_for(need + need / 8, together);
    return std::max(slots_for(need, together), more);
}

bool GraphRows::grow(const Incoming & incoming) {
    std::vector<Unmade> first;
    for (size_t l = 0; l < layers_.size(); l++) {
        for (Group & group : layers_[l].groups) {
            const int32_t slots = slots_wanted(group, incoming);
            if (!group.k) {
                first.push_back({ l, &group, slots });
            } else if (group.regions ? !grow_regions(l, group, incoming) : slots > group.slots && !make_group(l, group, slots)) {
                return false;
            }
        }
    }
    return make_groups(first);
}

bool GraphRows::inputs_fit(const Incoming & incoming) const {
    return incoming.n <= room_q_ && visible_after(incoming.n) <= room_visible_ && incoming.window <= room_recent_;
}

// For all tokens that were announced, or else for twice as many slots as there were.
bool GraphRows::make_inputs(const Incoming & incoming) {
    if (inputs_fit(incoming)) {
        return true;
    }
    const int32_t n = incoming.n, follow = incoming.follow;
    const int32_t shown = std::max(visible_after(follow), follow > n ? 0 : std::min(2 * room_visible_, slots_shown()));
    for (Inputs & inputs : inputs_) {
        Tensors held(6);
        auto    written = decltype(inputs.written)();
        for (auto & one : written) {
            one.index = held.add(GGML_TYPE_I64, (int64_t) inputs.entries * n + incoming.window);
            one.mask  = even_ ? held.add(GGML_TYPE_F16, (int64_t) shown * n) : nullptr;
            if (n == 1) {
                break;  // an answer's tokens wait for each other
            }
        }
        ggml_tensor * const zeros = held.add(GGML_TYPE_F32, 1, 1, inputs.most);
        const auto    spanned = (int64_t) inputs.spanned;
        ggml_tensor * const spans = spanned > 0 ? held.add(GGML_TYPE_I32, (spanned * inputs.span + 1) / 2 * 2 + 2 * spanned) : nullptr;
        room_q_ = room_visible_ = 0;
        if (!held.allocate(inputs.device)) {
            return refuse(inputs.device);
        }
        inputs.held    = std::move(held);
        inputs.written = written;
        inputs.zeros   = zeros;
        inputs.spans   = spans;
    }
    room_q_       = n;
    room_visible_ = shown;
    room_recent_  = incoming.window;
    stamp_        = ++*stamps_;
    return true;
}

bool GraphRows::rows_fit(const Incoming & incoming) const {
    return std::all_of(layers_.begin(), layers_.end(), [&](const Layer & layer) {
        return std::all_of(layer.groups.begin(), layer.groups.end(),
                           [&](const Group & group) { return slots_wanted(group, incoming) <= group.slots; });
    });
}

bool GraphRows::may_follow(const Incoming & incoming) const {
    const bool fits = rows_fit(incoming) && inputs_fit(incoming);
    return even_ && incoming.n > 1 && fits && keeps_queries(incoming) && keeps_sums(incoming);
}

bool GraphRows::reserve(const Incoming & incoming, int32_t n_threads) {
    if (!grow(incoming)) {
        return false;
    }
    n_threads_ = n_threads;
    if (even_ || incoming.n == 1) {
        forget_several();
    } else if (!make_several(incoming.n)) {
        return false;
    }
    if (!make_inputs(incoming) || !make_ring(incoming) || !make_sums(incoming)) {
        return false;
    }
    if (window_ != incoming.window || !(summed_ == incoming.summed)) {
        stamp_ = ++*stamps_;
    }
    window_ = incoming.window;
    summed_ = incoming.summed;
    return true;
}

// Of the next row of a head.
int32_t GraphRows::Group::take_slot(size_t head) {
    int32_t slot = used_of(head);
    if (spare[head].empty()) {
        used_of(head)++;
    } else {
        slot = spare[head].back();
        spare[head].pop_back();
    }
    if (ordered) {
        order[head].push_back(slot);
    }
    return slot;
}

void GraphRows::drop(size_t l, int32_t head, int32_t row) {
    for (Group & group : layers_[l].groups) {
        const auto at = std::lower_bound(group.heads.begin(), group.heads.end(), head);
        if (at == group.heads.end() || *at != head) {
            continue;
        }
        const auto i    = (size_t) (at - group.heads.begin());
        const auto slot = group.order[i].begin() + row;
        group.spare[i].push_back(*slot);
        const auto came = (size_t) (*slot - group.first[i]);
        if (came < group.biases[i].size()) {
            group.biases[i][came] = 0.0f;  // of the row that takes its place
        }
        group.order[i].erase(slot);
        if (group.spare[i].size() > 1) {  // else the next row takes it, and it stays visible
            write_mask(group);
        }
    }
}

void GraphRows::enter(int32_t n, bool causal) {
    n_    = n;
    turn_ = n > 1 ? 1 - turn_ : 0;
    std::vector<std::vector<int64_t>> index(inputs_.size());
    for (Layer & layer : layers_) {
        for (Group & group : layer.groups) {
            auto & slots = index[layer.inputs];
            for (int32_t t = 0; even_ && slots.size() < (size_t) n; t++) {
                slots.push_back(group.used[0] + t);
            }
            const size_t base = slots.size(), heads = group.heads.size(), many = (size_t) n;
            slots.resize(even_ ? base : base + heads * many);
            for (size_t i = 0; i < heads; i++) {
                for (size_t t = 0; t < many && !even_; t++) {
                    slots[base + i * many + t] = group.take_slot(i);
                }
                if (even_) {
                    group.used[i] += n;
                }
            }
            group.stale = group.stale || (!even_ && n > 1);
        }
    }
    ring_.tokens = window_ > 0 ? ring_.tokens + n : 0;  // a window that leaves tokens out is none
    ring_.last   = std::min(ring_.tokens, ring_.window);
    sums_.any    = sums_.any || summed_.any();
    for (size_t i = 0; i < inputs_.size(); i++) {
        const auto before = (int32_t) index[i][0];
        if (n == 1 && inputs_[i].spanned > 0) {
            write_spans(i, index[i]);
        }
        for (int32_t t = ring_.tokens - std::min(n, window_); t < ring_.tokens; t++) {
            index[i].push_back(t % window_);
        }
        if (n > 1 || inputs_[i].spanned < index[i].size()) {  // else they are with the spans
            ggml_backend_tensor_set(inputs_[i].written[turn_].index, index[i].data(), 0, index[i].size() * sizeof(int64_t));
        }
        if (even_) {
            write_even_mask(inputs_[i], before, causal);
        }
    }
    if (!even_ && n > 1) {
        write_several(causal);
    }
}

// The tokens entered last see `before` slots, and those of each other that they may.
void GraphRows::write_even_mask(Inputs & inputs, int32_t before, bool causal) const {
    constexpr size_t LARGE = 4 << 20;  // bytes that threads are started for
    const auto       shown = (size_t) visible(), bytes = shown * (size_t) n_ * sizeof(ggml_fp16_t);
    const std::unique_ptr<ggml_fp16_t[]> mask(new ggml_fp16_t[shown * (size_t) n_]);
    parallel_for(bytes < LARGE ? 1 : n_threads_, n_, [&](int32_t t, int32_t) {
        ggml_fp16_t * const row  = mask.get() + (size_t) t * shown;
        const auto          seen = (size_t) (before + (causal ? t + 1 : n_));
        std::fill_n(row, seen, ggml_fp32_to_fp16(0.0f));
        std::fill(row + seen, row + shown, ggml_fp32_to_fp16(-INFINITY));
    });
    ggml_backend_tensor_set(inputs.written[turn_].mask, mask.get(), 0, bytes);
}

}  // namespace kvedge
