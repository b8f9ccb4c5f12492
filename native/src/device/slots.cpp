#include "device/slots.h"

#include "device/attention.h"
#include "device/groups.h"
#include "device/graph_transfer.h"

#include <cmath>
#include <iterator>
#include <numeric>
#include <stdexcept>

namespace kvedge {

namespace {

constexpr int32_t STEP = 256;  // a graph reads a multiple of STEP slots, so that one graph serves many tokens

int32_t rounded(int32_t n) { return (n + STEP - 1) / STEP * STEP; }

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// A group

std::vector<int32_t> Group::slots_of(size_t i) const {
    std::vector<int32_t> out = ordered ? order[i] : std::vector<int32_t>((size_t) (used[i] - first[i]));
    if (!ordered) {
        std::iota(out.begin(), out.end(), first[i]);
    }
    for (int32_t & slot : out) {
        slot += regions ? 0 : (int32_t) i * slots;
    }
    return out;
}

std::vector<float> Group::biases_of(size_t i) const {
    const auto         rows = slots_of(i);
    const int32_t      from = first[i] + (regions ? 0 : (int32_t) i * slots);
    std::vector<float> out(rows.size());
    for (size_t r = 0; r < out.size(); r++) {
        const auto came = (size_t) (rows[r] - from);
        out[r]          = came < biases[i].size() ? biases[i][came] : 0.0f;
    }
    return out;
}

int32_t Group::take_slot(size_t i) {
    int32_t slot = used[i];
    if (spare[i].empty()) {
        used[i]++;
    } else {
        slot = spare[i].back();
        spare[i].pop_back();
    }
    if (ordered) {
        order[i].push_back(slot);
    }
    return slot;
}

void Group::drop(size_t i, int32_t row) {
    const auto slot = order[i].begin() + row;
    spare[i].push_back(*slot);
    const auto came = (size_t) (*slot - first[i]);
    if (came < biases[i].size()) {
        biases[i][came] = 0.0f;  // the next row in this slot has no bias
    }
    order[i].erase(slot);
    if (spare[i].size() > 1) {  // a single free slot stays visible: the next row takes it
        write_mask();
    }
}

std::vector<int32_t> Group::starts(int32_t room) const {
    std::vector<int32_t> out = { 0 };
    for (size_t i = 0; i < heads.size(); i++) {
        out.push_back(out.back() + used[i] - first[i] + room);
    }
    return out;
}

void Group::move_to(const std::vector<int32_t> & starts) {
    for (size_t i = 0; i < heads.size(); i++) {
        const int32_t by = starts[i] - first[i];
        first[i] += by;
        used[i] += by;
        for (auto * slots : { &order[i], &spare[i] }) {
            for (int32_t & slot : *slots) {
                slot += by;
            }
        }
    }
}

// Writes the bias of each row, and -inf for free slots. Slots behind the rows get -inf in a list; in a region they need no -inf,
// as the span ends the region.
void Group::write_mask() const {
    if (!mask) {
        return;
    }
    const ggml_fp16_t        hidden = ggml_fp32_to_fp16(-INFINITY), seen = ggml_fp32_to_fp16(0.0f);
    std::vector<ggml_fp16_t> all((size_t) slots * lists(), regions ? seen : hidden);
    for (size_t i = 0; i < heads.size(); i++) {
        const auto head = all.begin() + (std::ptrdiff_t) (regions ? 0 : i * (size_t) slots);
        std::fill(head + first[i], head + used[i], seen);
        for (size_t row = 0; row < biases[i].size(); row++) {
            head[first[i] + (std::ptrdiff_t) row] = ggml_fp32_to_fp16(biases[i][row]);
        }
        for (const int32_t slot : spare[i]) {
            head[slot] = hidden;
        }
    }
    ggml_backend_tensor_set(mask, all.data(), 0, all.size() * sizeof(ggml_fp16_t));
}

// ---------------------------------------------------------------------------------------------------------
// All layers

Slots::Slots(const std::vector<LayerShape> & of, const std::vector<ggml_backend_dev_t> & places, const Form & as, uint64_t & count,
             std::shared_ptr<Workers> by)
    : shapes(&of), form(as), stamps(&count), workers(std::move(by)), layers(of.size()) {
    for (size_t l = 0; l < layers.size(); l++) {
        layers[l].device = places[l];
    }
}

const Group & Slots::group_of(size_t l, int32_t head, size_t & at) const {
    for (const Group & group : layers[l].groups) {
        const auto it = std::find(group.heads.begin(), group.heads.end(), head);
        if (it != group.heads.end()) {
            at = (size_t) (it - group.heads.begin());
            return group;
        }
    }
    throw std::logic_error("a KV head belongs to no group");
}

std::vector<int32_t> Slots::places_of(size_t l, int32_t head) const {
    size_t        at    = 0;
    const Group & group = group_of(l, head, at);
    return group.slots_of(at);
}

void Slots::give_back_memory() {
    for (const DeviceTotals & on : devices) {
        on.worker->give_back_memory();
    }
}

bool Slots::refuse(ggml_backend_dev_t device) {
    full_device = ggml_backend_dev_name(device);
    return false;
}

// Allocates nothing, because callers ask after a compression, when nothing may fail.
uint64_t Slots::bytes() const {
    uint64_t   n     = 0;
    const auto holds = [](const DeviceLayer & layer, const Tensors * held) {
        return std::any_of(layer.groups.begin(), layer.groups.end(), [&](const Group & group) { return group.held.get() == held; });
    };
    for (auto layer = layers.begin(); layer != layers.end(); ++layer) {
        n += layer->order.bytes();
        for (auto group = layer->groups.begin(); group != layer->groups.end(); ++group) {
            const Tensors * held  = group->held.get();
            const bool      known = std::any_of(layer->groups.begin(), group, [&](const Group & g) { return g.held.get() == held; }) ||
                               std::any_of(std::make_reverse_iterator(layer), layers.rend(), [&](const auto & l) { return holds(l, held); });
            n += held && !known ? held->bytes() : 0;
        }
    }
    for (const DeviceTotals & on : devices) {
        n += on.worker->bytes();
    }
    return n;
}

Room Slots::room_for(size_t l, const Group & group, int32_t slots, const std::shared_ptr<Tensors> & held) const {
    const LayerShape & shape = (*shapes)[l];
    const auto         heads = (int64_t) group.heads.size(), lists = (int64_t) group.lists();
    const bool         picks = layers[l].joined || heads < shape.n_heads_kv, biased = form.dropping || !group.biases[0].empty();
    Room               room;
    room.held  = held;
    room.k     = held->add(ggml_type_of(form.storage.k), shape.d_k, slots, lists);
    room.v     = held->add(ggml_type_of(form.storage.v), shape.d_v, slots, lists);
    room.mask  = even || (group.regions && !biased) ? nullptr : held->add(GGML_TYPE_F16, slots, 1, lists);
    room.pick  = picks ? held->add(GGML_TYPE_I32, heads) : nullptr;
    room.slots = slots;
    return room;
}

void Group::fill() const {
    write_mask();
    if (pick) {
        ggml_backend_tensor_set(pick, heads.data(), 0, heads.size() * sizeof(int32_t));
    }
}

bool Slots::make_group(size_t l, Group & group, int32_t slots) {
    Room room = room_for(l, group, slots, std::make_shared<Tensors>(Room::TENSORS));
    if (!room.held->allocate(layers[l].device)) {
        return refuse(layers[l].device);
    }
    static_cast<Room &>(group) = std::move(room);
    group.fill();
    change();
    return true;
}

// Copies the rows of all groups in one graph. False: the device lacks an operation or memory, or failed.
bool Slots::copy_by_graph(const DeviceTotals & on, const std::vector<Unmade> & groups, const std::vector<Room> & to) const {
    constexpr size_t NODES = 10;  // graph nodes of a group
    GraphBuilder     builder(NODES * groups.size());
    GraphTransfer    transfer(on.device, on.worker);
    ggml_context *   c = builder.context.get();
    for (size_t i = 0; i < groups.size(); i++) {
        const Unmade & x     = groups[i];
        const Group &  group = *x.group;
        if (!as_numbers(group.k) || !as_numbers(group.v)) {
            return false;
        }
        ggml_tensor * const index = ggml_new_tensor_1d(c, GGML_TYPE_I32, (int64_t) x.slots * (int64_t) group.lists());
        transfer.send<int32_t>(index, [&x, &group](int32_t * out, int32_t) {
            for (size_t h = 0; h < group.heads.size(); h++) {  // slots without a row get the first row, a valid number
                const int32_t first = group.first[h] + (group.regions ? 0 : (int32_t) h * group.slots), rows = group.used[h] - group.first[h];
                const int32_t n     = group.regions ? x.starts[h + 1] - x.starts[h] : x.slots;
                for (int32_t r = 0; r < n; r++) {
                    *out++ = first + (r < rows ? r : 0);
                }
            }
        });
        builder.add(gathered(c, flat(c, group.k), index, to[i].k));
        builder.add(gathered(c, flat(c, group.v), index, to[i].v));
    }
    if (lacking(on.device, builder.graph) || !transfer.allocate()) {
        return false;
    }
    transfer.upload(n_threads);
    return on.worker->make_room(on.device, builder.graph, n_threads) && on.worker->compute(builder.graph);
}

// Moves groups of a device to larger buffers and frees the old buffers. False: the device is out of memory.
bool Slots::make_larger(const DeviceTotals & on, const std::vector<Unmade> & groups) {
    const auto        held = std::make_shared<Tensors>(Room::TENSORS * groups.size());
    std::vector<Room> rooms;
    for (const Unmade & x : groups) {
        rooms.push_back(room_for(x.layer, *x.group, x.slots, held));
    }
    if (!held->allocate(on.device)) {
        return refuse(on.device);
    }
    const bool copied = copy_by_graph(on, groups, rooms);
    for (size_t i = 0; i < groups.size(); i++) {
        Group & group = *groups[i].group;
        for (const bool keys : { true, false }) {
            ggml_tensor * const from = keys ? group.k : group.v, * const to = keys ? rooms[i].k : rooms[i].v;
            if (!copied && group.regions) {
                copy_regions(from, to, group.first, group.used, groups[i].starts);
            } else if (!copied) {
                copy_slots(from, to, group.most_used());
            }
        }
        if (group.regions) {
            group.move_to(groups[i].starts);
        }
        static_cast<Room &>(group) = std::move(rooms[i]);
        group.fill();
    }
    on.worker->give_back_memory();
    change();
    return true;
}

// Makes the first buffers of a sequence. Layers share a buffer, because each buffer costs time on a device. A device gets several
// buffers, so that a compression can free one before it has replaced all layers.
bool Slots::make_groups(const std::vector<Unmade> & groups) {
    constexpr size_t BUFFERS = 4;  // buffers of a device
    for (const DeviceTotals & on : devices) {
        std::vector<Unmade> of;
        std::copy_if(groups.begin(), groups.end(), std::back_inserter(of), [&](const Unmade & x) { return layers[x.layer].device == on.device; });
        const size_t share = (of.size() + BUFFERS - 1) / BUFFERS;
        for (size_t from = 0; from < of.size(); from += share) {
            const size_t end  = std::min(from + share, of.size());
            const auto   held = std::make_shared<Tensors>(Room::TENSORS * (end - from));
            std::vector<Room> rooms;
            for (size_t i = from; i < end; i++) {
                rooms.push_back(room_for(of[i].layer, *of[i].group, of[i].slots, held));
            }
            if (!held->allocate(on.device)) {
                return refuse(on.device);
            }
            for (size_t i = from; i < end; i++) {
                static_cast<Room &>(*of[i].group) = std::move(rooms[i - from]);
                of[i].group->fill();
            }
            change();
        }
    }
    return true;
}

void Slots::plan_devices() {
    for (size_t l = 0; l < layers.size(); l++) {
        DeviceLayer & layer = layers[l];
        if (!layer.device) {
            continue;
        }
        auto it = std::find_if(devices.begin(), devices.end(), [&](const DeviceTotals & on) { return on.device == layer.device; });
        if (it == devices.end()) {
            it = devices.insert(it, DeviceTotals{});
            it->device  = layer.device;
            it->worker  = workers->of(layer.device);
            it->entries = even ? 1 : 0;
        }
        layer.on       = (size_t) (it - devices.begin());
        layer.query_at = it->query;
        layer.head_at  = it->heads;
        it->layers.push_back(l);
        it->query += (size_t) (*shapes)[l].d_k * (size_t) (*shapes)[l].n_heads;
        it->heads += (size_t) (*shapes)[l].n_heads_kv;
        for (Group & group : layer.groups) {
            group.entry = even ? 0 : it->entries;
            group.span  = it->spanned;
            if (group.regions) {
                it->spanned += group.heads.size();
                it->span = std::max<int64_t>(it->span, 2 + (*shapes)[l].n_heads / (*shapes)[l].n_heads_kv);
            }
            it->entries += even ? 0 : group.heads.size();
            it->most = std::max(it->most, (int32_t) group.heads.size());
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Room for tokens

int32_t Slots::visible(int32_t more) const {
    for (const DeviceLayer & layer : layers) {
        if (layer.device && even) {
            const Group & group = layer.groups[0];
            return std::min(group.slots, rounded(group.most_used() + more));
        }
    }
    return 0;
}

int32_t Slots::even_rows() const {
    for (const DeviceLayer & layer : layers) {
        if (layer.device && even) {
            return layer.groups[0].most_used();
        }
    }
    return 0;
}

// Returns the slots that each list of a group needs. Not for regions.
static int32_t wanted(const Group & group, const Incoming & incoming, bool even) {
    const int32_t held = group.most_used(), need = held + incoming.n;
    if (need <= group.slots) {
        return group.slots;
    }
    if (incoming.announced > incoming.n) {
        return slots_for(held + incoming.announced);
    }
    // growth in proportion to the size keeps the copies per token constant
    const int32_t more = even && incoming.n > 1 ? rounded(need + need / 2) : slots_for(need + need / 8);
    return std::max(slots_for(need), more);
}

// Returns the new starts of a group's regions; empty: all regions have room.
static std::vector<int32_t> grown_regions(const Group & group, const Incoming & incoming) {
    int32_t rows = 0;
    bool    fit  = true;
    for (size_t i = 0; i < group.heads.size(); i++) {
        const int32_t end = i + 1 < group.heads.size() ? group.first[i + 1] : group.slots;
        fit               = fit && group.used[i] + incoming.n <= end;
        rows += group.used[i] - group.first[i];
    }
    const int32_t mean = rows / (int32_t) group.heads.size();
    const int32_t more = incoming.announced > incoming.n ? incoming.announced : incoming.n + (incoming.n + mean) / 8;
    return fit ? std::vector<int32_t>() : group.starts(REGION_ROOM + more);
}

bool Slots::fits(const Incoming & incoming) const {
    return std::all_of(layers.begin(), layers.end(), [&](const DeviceLayer & layer) {
        return std::all_of(layer.groups.begin(), layer.groups.end(),
                           [&](const Group & group) { return wanted(group, incoming, even) <= group.slots; });
    });
}

bool Slots::grow(const Incoming & incoming) {
    constexpr uint64_t AT_ONCE = 64 << 20;  // bytes of new rows per buffer: more saves time, but the old rows stay that long
    std::vector<Unmade> first;
    for (const DeviceTotals & on : devices) {
        std::vector<Unmade> larger;
        uint64_t            bytes = 0;
        for (const size_t l : on.layers) {
            for (Group & group : layers[l].groups) {
                const auto    starts = group.regions && group.k ? grown_regions(group, incoming) : std::vector<int32_t>();
                const int32_t slots  = starts.empty() ? group.regions ? group.slots : wanted(group, incoming, even) : starts.back();
                if (!group.k) {
                    first.push_back({ l, &group, slots, {} });
                } else if (slots > group.slots || !starts.empty()) {
                    larger.push_back({ l, &group, slots, starts });
                    bytes += (uint64_t) slots * group.lists() * (group.k->nb[1] + group.v->nb[1]);
                }
            }
            if (bytes > AT_ONCE || (l == on.layers.back() && !larger.empty())) {
                if (!make_larger(on, larger)) {
                    return false;
                }
                larger.clear();
                bytes = 0;
            }
        }
    }
    return make_groups(first);
}

std::vector<std::vector<int64_t>> Slots::take(int32_t n) {
    std::vector<std::vector<int64_t>> index(devices.size());
    for (DeviceLayer & layer : layers) {
        for (Group & group : layer.groups) {
            auto & slots = index[layer.on];
            for (int32_t t = 0; even && slots.size() < (size_t) n; t++) {
                slots.push_back(group.used[0] + t);
            }
            for (size_t i = 0; i < group.heads.size(); i++) {
                for (int32_t t = 0; t < n && !even; t++) {
                    slots.push_back(group.take_slot(i));
                }
                group.used[i] += even ? n : 0;
            }
            group.stale = group.stale || (!even && n > 1);
        }
    }
    return index;
}

// ---------------------------------------------------------------------------------------------------------
// The layout of a layer

// Returns a group of KV heads with its slots planned, but without memory. Moves the heads' biases out of `of`.
Group Slots::placed(HeadRows & of, const std::vector<int32_t> & heads, bool regions) const {
    int32_t rows = 0, next = 0;
    for (const int32_t head : heads) {
        rows += of.n[(size_t) head];
    }
    const int32_t mean = rows / (int32_t) heads.size();  // equal free slots: each token takes one slot of each head
    Group         group;
    group.heads   = heads;
    group.regions = regions;
    group.ordered = form.dropping;
    group.spare.resize(heads.size());
    for (const int32_t at : heads) {
        const auto    head = (size_t) at;
        const int32_t n = of.n[head], start = regions ? next : 0;
        group.first.push_back(start);
        group.used.push_back(start + n);
        group.order.emplace_back(group.ordered ? (size_t) n : 0);
        std::iota(group.order.back().begin(), group.order.back().end(), start);
        group.biases.push_back(of.biases.empty() ? std::vector<float>() : std::move(of.biases[head]));
        next += n + REGION_ROOM + mean / 32;
    }
    const int32_t used = group.most_used(), more = used / 32;  // slots for tokens of the answer, in addition to slots_for's
    // an empty even group has no slots yet: grow() will know the length of the prompt
    group.slots = used == 0 && even ? 0 : regions ? next : slots_for(used + more);
    return group;
}

// Makes DeviceLayer::joined, unless the KV heads are ascending. heads: KV heads in the order of the groups.
bool Slots::make_order(size_t l, const std::vector<int32_t> & heads) {
    DeviceLayer & layer = layers[l];
    if (std::is_sorted(heads.begin(), heads.end())) {
        return true;
    }
    std::vector<int32_t> joined(heads.size());
    for (size_t i = 0; i < heads.size(); i++) {
        joined[(size_t) heads[i]] = (int32_t) i;
    }
    layer.order  = Tensors(1);
    layer.joined = layer.order.add(GGML_TYPE_I32, (int64_t) heads.size());
    if (!layer.order.allocate(layer.device)) {
        return refuse(layer.device);
    }
    ggml_backend_tensor_set(layer.joined, joined.data(), 0, joined.size() * sizeof(int32_t));
    return true;
}

bool Slots::lay_out(size_t l, HeadRows && rows) {
    const LayerShape &   shape = (*shapes)[l];
    DeviceLayer &        layer = layers[l];
    std::vector<int32_t> order((size_t) shape.n_heads_kv);
    std::iota(order.begin(), order.end(), 0);
    std::vector<std::vector<int32_t>> groups = { order };
    const bool regions = !even && has_ragged(layer.device, shape, form.storage);
    if (!even && !regions) {
        groups = group_heads(rows.n);
        order.clear();
        for (const auto & heads : groups) {
            order.insert(order.end(), heads.begin(), heads.end());
        }
    }
    if (!make_order(l, order)) {
        return false;
    }
    for (const auto & heads : groups) {
        layer.groups.push_back(placed(rows, heads, regions));
    }
    return true;
}

}  // namespace kvedge
