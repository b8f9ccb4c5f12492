// Copies the kept rows of a compression on their devices: the rows of a few layers at a time go to new buffers, then the old buffers
// are freed.

#include "device/compressing.h"

#include "system/threads.h"

#include <algorithm>
#include <functional>
#include <new>
#include <numeric>
#include <string>

namespace kvedge {

using T       = ggml_tensor *;
using Outcome = DeviceRows::Outcome;

namespace {

// Memory beside the rows of a device: 1 / AHEAD of their bytes for new rows before old rows are freed, but at least LEAST_AHEAD bytes;
// 1 / WORK of their bytes for one large result of a graph.
constexpr uint64_t AHEAD = 64, LEAST_AHEAD = 16 << 20, WORK = 24;

std::vector<ggml_backend_dev_t> devices_of(const Slots & of) {
    std::vector<ggml_backend_dev_t> out;
    for (const DeviceLayer & layer : of.layers) {
        out.push_back(layer.device);
    }
    return out;
}

uint64_t bytes_of(const DeviceLayer & layer) {
    uint64_t n = 0;
    for (const Group & group : layer.groups) {
        n += ggml_nbytes(group.k) + ggml_nbytes(group.v);
    }
    return n;
}

// Returns the bytes of the rows of all layers of one device.
uint64_t bytes_on(const Slots & slots, size_t device) {
    uint64_t n = 0;
    for (const DeviceLayer & layer : slots.layers) {
        n += layer.on == device ? bytes_of(layer) : 0;
    }
    return n;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// The old and the new layout

GraphRows::Compressing::Compressing(GraphRows & rows, const CompressJob & job)
    : rows(rows), from(rows.slots_), next(*from.shapes, devices_of(from), { job.storage, job.dropping }, *from.stamps, from.workers), job(job),
      places(from.layers.size()), stay(from.layers.size()), merging(*this), moved_places(from.layers.size()), copies(from.layers.size()) {
    lay_out_sources();
}

void GraphRows::Compressing::lay_out_sources() {
    std::vector<uint8_t> any(places.size());
    parallel_for(from.n_threads, (int32_t) places.size(), [&](int32_t i, int32_t) {
        const auto l = (size_t) i;
        for (int32_t h = 0; from.layers[l].device && h < (*from.shapes)[l].n_heads_kv; h++) {
            size_t        at   = 0;
            const Group & own  = from.group_of(l, h, at);
            int32_t       base = 0;
            for (const Group * group = from.layers[l].groups.data(); group != &own; group++) {
                base += (int32_t) (group->k->ne[1] * group->k->ne[2]);
            }
            places[l].push_back(from.places_of(l, h));
            for (int32_t & row : places[l].back()) {
                row += base;
            }
            const auto * biases = pending_biases(l, (size_t) h);
            stay[l].emplace_back();
            for (const int32_t row : biases ? job.kept[l][(size_t) h] : std::vector<int32_t>()) {
                stay[l].back().push_back((*biases)[(size_t) row]);
            }
            any[l] |= biases || !own.biases[at].empty() ? 1 : 0;
        }
    });
    biased = (job.rule && job.rule->mass) || std::any_of(any.begin(), any.end(), [](uint8_t x) { return x != 0; });
    for (size_t l = 0; biased && l < places.size(); l++) {
        for (size_t h = 0; h < places[l].size(); h++) {
            stay[l][h].resize(job.kept[l][h].size());
        }
    }
}

const std::vector<float> * GraphRows::Compressing::pending_biases(size_t l, size_t head) const {
    const bool any = job.biases && !job.biases->empty() && !(*job.biases)[l].empty() && !(*job.biases)[l][head].empty();
    return any ? &(*job.biases)[l][head] : nullptr;
}

size_t GraphRows::Compressing::n_old(size_t l, size_t head) const { return places[l][head].size() - (size_t) job.n_tokens; }

// Returns the biases of all rows of a KV head after the compression, in token order.
std::vector<float> GraphRows::Compressing::biases_of(size_t l, int32_t head) const {
    size_t             at  = 0;
    std::vector<float> out = from.group_of(l, head, at).biases_of(at);
    out.resize(n_old(l, (size_t) head));
    out.insert(out.end(), stay[l][(size_t) head].begin(), stay[l][(size_t) head].end());
    return out;
}

// Returns whether the buffers may stay, so that only pending rows move. This is worth it if few rows are evicted, as after a short
// message; the next tokens take their slots. even: whether the new layout is even.
bool GraphRows::Compressing::may_stay(bool even) const {
    constexpr size_t FEW = 128, SHARE = 4;
    size_t           old = 0, kept = 0, gone = 0, heads = 0;
    bool             masked = true;
    for (size_t l = 0; l < places.size(); l++) {
        for (size_t h = 0; h < places[l].size(); h++, heads++) {
            old += n_old(l, h);
            kept += job.kept[l][h].size();
            gone += (size_t) job.n_tokens - job.kept[l][h].size();
        }
        for (const Group & group : from.layers[l].groups) {
            masked = masked && group.mask;
        }
    }
    return from.form == next.form && !job.dropping && even == from.even && (masked || !biased) && old > 0 &&
           gone <= std::max(FEW * heads, (old + kept) / SHARE);
}

void GraphRows::Compressing::lay_out_in_place() {
    in_place = true;
    for (size_t l = 0; l < places.size(); l++) {
        next.layers[l].groups = from.layers[l].groups;
        for (Group & group : next.layers[l].groups) {
            for (size_t i = 0; i < group.heads.size(); i++) {
                const int32_t head = group.heads[i];
                group.used[i] -= job.n_tokens - (int32_t) job.kept[l][(size_t) head].size();
                group.biases[i] = biased ? biases_of(l, head) : std::vector<float>();
            }
            group.stale = !from.even;
        }
        for (auto & of : places[l]) {
            const auto pending = of.end() - job.n_tokens;
            moved_places[l].insert(moved_places[l].end(), pending, of.end());
            std::iota(pending, of.end(), (int32_t) moved_places[l].size() - job.n_tokens);
        }
    }
}

Outcome GraphRows::Compressing::lay_out_next() {
    std::vector<int32_t> all;
    for (size_t l = 0; l < places.size(); l++) {
        for (size_t h = 0; h < places[l].size(); h++) {
            all.push_back((int32_t) (n_old(l, h) + job.kept[l][h].size()));
        }
    }
    const bool same = std::adjacent_find(all.begin(), all.end(), std::not_equal_to<>()) == all.end();
    next.even       = !job.dropping && !biased && same;
    if (may_stay(next.even)) {
        lay_out_in_place();
        return Outcome::done;
    }
    auto length = all.begin();
    for (size_t l = 0; l < places.size(); l++) {
        HeadRows rows;
        for (size_t h = 0; h < places[l].size(); h++) {
            rows.n.push_back(*length++);
            if (biased) {
                rows.biases.push_back(biases_of(l, (int32_t) h));
            }
        }
        if (!places[l].empty() && !next.lay_out(l, std::move(rows))) {
            return problem(Outcome::full, l, "has no memory for the kept rows");
        }
        if (next.even && from.even && !places[l].empty() && n_old(l, 0) > 0) {  // the old number of slots is enough
            Group & group = next.layers[l].groups[0];
            group.slots   = std::min(group.slots, from.layers[l].groups[0].slots);
        }
    }
    return Outcome::done;
}

// Makes as few bundles as the memory allows, because each buffer takes time to make.
void GraphRows::Compressing::make_bundles() {
    const size_t          n = from.devices.size();
    std::vector<uint64_t> may(n), taken(n), freed(n);  // [device] bytes
    for (size_t i = 0; i < n; i++) {
        may[i] = std::max(bytes_on(from, i) / AHEAD, LEAST_AHEAD);
    }
    for (size_t l = 0; l < places.size(); l++) {
        if (places[l].empty()) {
            continue;
        }
        const size_t i    = from.layers[l].on;
        uint64_t     size = 0;
        for (const Group & group : in_place ? std::vector<Group>() : next.layers[l].groups) {
            const LayerShape & s    = (*from.shapes)[l];
            const size_t       mask = next.even ? 0 : group.heads.size() * sizeof(ggml_fp16_t);
            const size_t       k    = ggml_row_size(ggml_type_of(job.storage.k), s.d_k);
            const size_t       v    = ggml_row_size(ggml_type_of(job.storage.v), s.d_v);
            size += (uint64_t) group.slots * (group.lists() * (k + v) + mask);
        }
        const bool same = !bundles.empty() && from.layers[bundles.back().layers[0]].on == i;
        if (!same || taken[i] + size > may[i] + freed[i]) {
            for (const size_t done : same ? bundles.back().layers : std::vector<size_t>()) {
                freed[i] += bytes_of(from.layers[done]);
            }
            bundles.emplace_back();
        }
        bundles.back().layers.push_back(l);
        taken[i] += size;
    }
}

size_t GraphRows::Compressing::work_bytes(size_t l) const {
    constexpr uint64_t LEAST = 8 << 20, MOST = 64 << 20;
    return (size_t) std::clamp(bytes_on(from, from.layers[l].on) / WORK, LEAST, MOST);
}

T GraphRows::Compressing::flat(ggml_context * c, size_t l, bool keys) const {
    if (copies[l][keys ? 0 : 1]) {
        return copies[l][keys ? 0 : 1];
    }
    const auto & groups = from.layers[l].groups;
    const T      first  = keys ? groups[0].k : groups[0].v;
    if (groups.size() == 1) {
        return kvedge::flat(c, first);
    }
    T all = flat_as(c, first, GGML_TYPE_I32);
    for (size_t g = 1; g < groups.size(); g++) {
        all = ggml_concat(c, all, flat_as(c, keys ? groups[g].k : groups[g].v, GGML_TYPE_I32), 1);
    }
    return flat_as(c, all, first->type);
}

// ---------------------------------------------------------------------------------------------------------
// Graphs

Outcome GraphRows::Compressing::problem(Outcome outcome, size_t l, const char * what, const char * which) {
    return rows.fail(outcome, from.layers[l].device, what, which);
}

Outcome GraphRows::Compressing::prepare(size_t l, GraphBuilder & builder) {
    const auto device = from.layers[l].device;
    if (const char * operation = kvedge::lacking(device, builder.graph)) {
        return problem(Outcome::lacking, l, "cannot compute operation ", operation);
    }
    const bool room = from.devices[from.layers[l].on].worker->make_room(device, builder.graph, from.n_threads);
    return room ? Outcome::done : problem(Outcome::full, l, "has no memory to compress rows");
}

Outcome GraphRows::Compressing::compute(size_t l, GraphBuilder & builder) {
    rows.work.operations += operations_of(builder.graph);
    const bool good = from.devices[from.layers[l].on].worker->compute(builder.graph);
    return good ? Outcome::done : problem(Outcome::failed, l, "failed to compress rows; read the prompt again");
}

void GraphRows::Compressing::upload(GraphTransfer & transfer) {
    const Timer timer(rows.work.upload_us);
    rows.work.to_device += transfer.sent_bytes();
    transfer.upload(from.n_threads);
}

void GraphRows::Compressing::download(const ggml_tensor * from_device, void * to) {
    rows.work.to_host += ggml_nbytes(from_device);
    ggml_backend_tensor_get(from_device, to, 0, ggml_nbytes(from_device));
}

// Writes for each slot of a new group the place of its row in flat(). Slots without a row get any existing row: the mask hides these
// slots, but their numbers must not be NaN.
void GraphRows::Compressing::write_list(size_t l, const Group & group, int32_t * list) const {
    const auto & any = places[l][(size_t) group.heads[0]];
    std::fill_n(list, (size_t) group.slots * group.lists(), any.empty() ? 0 : any[0]);
    for (const int32_t h : group.heads) {
        const auto   to  = next.places_of(l, h);
        const auto & at  = places[l][(size_t) h];
        const size_t old = n_old(l, (size_t) h);
        for (size_t r = 0; r < to.size(); r++) {
            list[to[r]] = at[r < old ? r : old + (size_t) job.kept[l][(size_t) h][r - old]];
        }
    }
}

// Moves the kept pending rows of a layer together within their buffer. The rows are copied out first, because their new slots hold
// other pending rows. Slots that become free get a copy of a kept row.
void GraphRows::Compressing::move_pending(size_t l, Bundle & bundle) {
    ggml_context * c     = bundle.gather->context.get();
    const T        index = ggml_new_tensor_1d(c, GGML_TYPE_I32, (int64_t) moved_places[l].size());
    const auto & moved   = moved_places[l];
    bundle.transfer->send<int32_t>(index, [&moved](int32_t * to, int32_t) { std::copy(moved.begin(), moved.end(), to); });
    std::array<T, 2> both;
    copies[l] = {};
    for (const bool keys : { true, false }) {
        const T rows = flat(c, l, keys), out = ggml_get_rows(c, flat_as(c, rows, GGML_TYPE_I32), index);
        bundle.gather->add(out);
        both[keys ? 0 : 1] = flat_as(c, out, rows->type);
    }
    copies[l] = both;
    for (const Group & group : next.layers[l].groups) {
        const auto n    = (int64_t) group.heads.size() * job.n_tokens;
        const T    some = ggml_new_tensor_1d(c, GGML_TYPE_I32, n), to = ggml_new_tensor_1d(c, GGML_TYPE_I64, n);
        bundle.transfer->send<int32_t>(some, [this, l, &group](int32_t * out, int32_t) {
            for (const int32_t h : group.heads) {
                const auto &    kept = job.kept[l][(size_t) h];
                const int32_t * rows = places[l][(size_t) h].data() + n_old(l, (size_t) h);
                for (size_t t = 0; t < (size_t) job.n_tokens; t++) {
                    *out++ = rows[kept[t < kept.size() ? t : 0]];
                }
            }
        });
        bundle.transfer->send<int64_t>(to, [this, l, &group](int64_t * out, int32_t) {
            for (const int32_t h : group.heads) {
                const auto rows = from.places_of(l, h);
                out             = std::copy(rows.end() - job.n_tokens, rows.end(), out);
            }
        });
        bundle.gather->add(ggml_set_rows(c, kvedge::flat(c, group.k), ggml_get_rows(c, both[0], some), to));
        bundle.gather->add(ggml_set_rows(c, kvedge::flat(c, group.v), ggml_get_rows(c, both[1], some), to));
    }
}

void GraphRows::Compressing::build_graphs(Bundle & bundle) {
    size_t nodes[2] = { 0, 0 };
    for (const size_t l : bundle.layers) {
        nodes[0] += 2 * flat_nodes(l) + 16 * next.layers[l].groups.size() + (in_place ? 8 : 0);
        nodes[in_place ? 0 : 1] += job.rule ? merging.nodes(l) : 0;
    }
    bundle.gather = std::make_unique<GraphBuilder>(nodes[0]);
    bundle.merge  = nodes[1] > 0 ? std::make_unique<GraphBuilder>(nodes[1]) : nullptr;
    ggml_context * c = bundle.gather->context.get();
    for (const size_t l : bundle.layers) {
        if (in_place) {
            move_pending(l, bundle);
            if (job.rule) {
                merging.add_up(l, *bundle.transfer, *bundle.gather);
            }
            continue;
        }
        const T keys = flat(c, l, true), values = flat(c, l, false);
        for (const Group & group : next.layers[l].groups) {
            const T index = ggml_new_tensor_1d(c, GGML_TYPE_I32, (int64_t) group.slots * (int64_t) group.lists());
            bundle.transfer->send<int32_t>(index, [this, l, &group](int32_t * to, int32_t) { write_list(l, group, to); });
            bundle.gather->add(gathered(c, keys, index, group.k));
            bundle.gather->add(gathered(c, values, index, group.v));
        }
        if (bundle.merge) {
            merging.add_up(l, *bundle.transfer, *bundle.merge);
        }
    }
}

// Takes memory for the new rows of a bundle and for its graphs, and uploads the inputs. Keeps the old rows.
Outcome GraphRows::Compressing::open(Bundle & bundle) {
    const size_t first = bundle.layers[0];
    size_t       n     = 0;
    for (const size_t l : bundle.layers) {
        n += in_place ? 0 : Room::TENSORS * next.layers[l].groups.size();
    }
    bundle.held = std::make_shared<Tensors>(n);
    for (const size_t l : bundle.layers) {
        for (size_t g = 0; g < next.layers[l].groups.size() && !in_place; g++) {
            Group & group = next.layers[l].groups[g];
            static_cast<Room &>(group) = next.room_for(l, group, group.slots, bundle.held);
        }
    }
    if (in_place || bundle.held->allocate(from.layers[first].device)) {
        bundle.transfer = std::make_unique<GraphTransfer>(from.layers[first].device, from.devices[from.layers[first].on].worker);
        build_graphs(bundle);
    }
    if (!bundle.transfer || !bundle.transfer->allocate()) {
        return problem(Outcome::full, first, "has no memory for the kept rows");
    }
    upload(*bundle.transfer);
    Outcome outcome = Outcome::done;
    for (GraphBuilder * part : { bundle.gather.get(), bundle.merge.get() }) {
        outcome = part && outcome == Outcome::done ? prepare(first, *part) : outcome;
    }
    return outcome;
}

Outcome GraphRows::Compressing::finish(Bundle & bundle) {
    const size_t first  = bundle.layers[0];
    const auto   timed  = [&](GraphBuilder & builder, int64_t & us) {
        const Timer timer(us);
        return compute(first, builder);
    };
    Outcome outcome = timed(*bundle.gather, rows.work.gather_us);
    if (outcome == Outcome::done && bundle.merge) {
        outcome = timed(*bundle.merge, rows.work.merge_us);
    }
    if (outcome != Outcome::done || in_place) {
        return outcome;
    }
    {
        const Timer timer(rows.work.gather_us);
        for (const size_t l : bundle.layers) {
            from.layers[l].groups.clear();
        }
    }
    const Timer timer(rows.work.upload_us);
    const bool at_once = copies_at_once(from.layers[first].device);
    parallel_for(at_once ? from.n_threads : 1, (int32_t) bundle.layers.size(), [&](int32_t i, int32_t) {
        for (const Group & group : next.layers[bundle.layers[(size_t) i]].groups) {
            group.fill();
        }
    });
    for (const size_t l : bundle.layers) {
        for (const Group & group : next.layers[l].groups) {
            rows.work.to_device += group.mask ? ggml_nbytes(group.mask) : 0;
        }
    }
    bundle = Bundle();
    return outcome;
}

// ---------------------------------------------------------------------------------------------------------
// The whole compression

// Opens a bundle. If the device is out of memory, opens half of its layers; the other layers become the next bundle.
Outcome GraphRows::Compressing::open_some(size_t b) {
    for (;;) {
        auto &        layers  = bundles[b].layers;
        const Outcome outcome = open(bundles[b]);
        const auto    half    = (std::ptrdiff_t) (layers.size() / 2);
        if (outcome != Outcome::full || half == 0) {
            return outcome;
        }
        Bundle first, rest;
        first.layers.assign(layers.begin(), layers.begin() + half);
        rest.layers.assign(layers.begin() + half, layers.end());
        bundles[b] = std::move(first);
        bundles.insert(bundles.begin() + (std::ptrdiff_t) b + 1, std::move(rest));
    }
}

Outcome GraphRows::Compressing::check() {
    for (size_t l = 0; l < places.size(); l++) {
        const LayerShape & s = (*from.shapes)[l];
        for (size_t h = 0; h < places[l].size(); h++) {
            if (job.kept[l][h].empty()) {
                return problem(Outcome::lacking, l, "cannot store a KV head that keeps no rows");
            }
        }
        for (const Group & group : from.layers[l].groups) {
            if (!as_numbers(group.k) || !as_numbers(group.v)) {
                return problem(Outcome::lacking, l, "cannot copy rows whose size is not a multiple of 4 bytes");
            }
        }
        const bool plain = ggml_type_of(job.storage.k) != GGML_TYPE_COUNT && ggml_type_of(job.storage.v) != GGML_TYPE_COUNT;
        if (!places[l].empty() && !(plain && attends_to(from.layers[l].device, job.storage, s.d_k, s.d_v))) {
            return problem(Outcome::lacking, l, "cannot compute attention over rows of these types");
        }
    }
    return Outcome::done;
}

Outcome GraphRows::Compressing::prepare_all() {
    Outcome outcome = check();
    if (outcome != Outcome::done) {
        return outcome;
    }
    rows.sums.forget();
    if (job.rule) {
        const int64_t before = rows.work.upload_us;
        {
            const Timer timer(rows.work.merge_us);
            outcome = merging.search();
        }
        rows.work.merge_us -= rows.work.upload_us - before;
    }
    outcome = outcome == Outcome::done ? lay_out_next() : outcome;
    if (outcome != Outcome::done) {
        return outcome;
    }
    if (job.rule) {
        const Timer timer(rows.work.merge_us);
        merging.plan();
    }
    make_bundles();
    std::vector<uint8_t> any(from.devices.size());
    for (size_t b = 0; b < bundles.size() && outcome == Outcome::done; b++) {
        uint8_t & opened = any[from.layers[bundles[b].layers[0]].on];
        outcome          = opened ? Outcome::done : open_some(b);
        opened           = 1;
    }
    return outcome;
}

Outcome GraphRows::Compressing::replace_all() {
    rows.queries.forget();  // after this point the host cannot take over the compression
    for (size_t b = 0; b < bundles.size(); b++) {
        const Outcome opened = bundles[b].held ? Outcome::done : open_some(b);
        if (opened != Outcome::done || finish(bundles[b]) != Outcome::done) {
            return Outcome::failed;
        }
    }
    for (size_t l = 0; l < places.size() && in_place; l++) {  // no call of change(): the graphs' tensors are the same
        from.layers[l].groups = std::move(next.layers[l].groups);
    }
    if (!in_place) {
        next.plan_devices();
        from.form    = next.form;
        from.layers  = std::move(next.layers);
        from.devices = std::move(next.devices);
        from.even    = next.even;
        from.change();
        rows.inputs_.forget();
    }
    if (job.out && biased) {
        job.out->resize(stay.size());
        for (size_t l = 0; l < stay.size(); l++) {
            (*job.out)[l] = places[l].empty() ? std::move((*job.out)[l]) : std::move(stay[l]);
        }
    }
    return Outcome::done;
}

DeviceRows::Outcome GraphRows::compress(const CompressJob & job) {
    bool started = false;
    problem_.clear();
    try {
        Compressing compressing(*this, job);
        Outcome     outcome = compressing.prepare_all();
        started             = outcome == Outcome::done;
        outcome             = started ? compressing.replace_all() : outcome;
        slots_.give_back_memory();
        return outcome;
    } catch (const std::bad_alloc &) {
        problem_.set({ "no memory on the host to compress rows on devices" });
        return started ? Outcome::failed : Outcome::full;
    }
}

}  // namespace kvedge
