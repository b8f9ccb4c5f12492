// Layers on devices: where a layer lies, when its rows go there and come back, and the graph's share of the work.
//
// A device attends over the rows of a prompt and of an answer, and adds up a prompt's attention. What looks at rows in other
// ways takes place on the host, with the rows fetched: compression, and attention whose weights somebody wants (watched tokens,
// scores of a decode policy). A ubatch attends on devices if all its sequences can.

#include "glue/calls.h"

#include <algorithm>
#include <string>

using namespace kvedge;

namespace {

// The device of the weights that made a tensor; NULL: there are none.
ggml_backend_dev_t device_of(const ggml_tensor * t, int depth) {
    constexpr int DEEPEST = 12;  // operations between a projection and its attention
    if (!t || depth > DEEPEST) {
        return nullptr;
    }
    if (t->buffer && ggml_backend_buffer_get_usage(t->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
        return ggml_backend_buft_get_device(ggml_backend_buffer_get_type(t->buffer));
    }
    for (const ggml_tensor * from : t->src) {
        if (const auto device = device_of(from, depth + 1)) {
            return device;
        }
    }
    return nullptr;
}

bool follow_each_other(const std::vector<int32_t> & index) {
    for (size_t i = 1; i < index.size(); i++) {
        if (index[i] != index[i - 1] + 1) {
            return false;
        }
    }
    return true;
}

}  // namespace

ggml_backend_dev_t kvedge_cache::place_of(const llama_attn_provider_layer & layer) const {
    const ggml_backend_dev_t host = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const bool rotates = rotate == KVEDGE_ROTATE_ON && storage.quantised();
    if (devices == KVEDGE_DEVICES_NONE || rotates) {
        return nullptr;
    }
    ggml_backend_dev_t device = device_of(layer.k, 0);
    if (!device || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        device = devices == KVEDGE_DEVICES_ALL ? host : nullptr;
    }
    return device && GraphRows::holds(storage, layer.k->ne[0], layer.v->ne[0], device) ? device : nullptr;
}

uint32_t kvedge_cache::device_layers() const {
    return (uint32_t) std::count_if(places.begin(), places.end(), [](auto * place) { return place != nullptr; });
}

bool kvedge_cache::even(const SequenceState & state) const {
    if (!state.kept.empty()) {
        return false;
    }
    const bool known = state.device && !state.device->form().dropping;
    return known ? state.device->even() : GraphRows::holds_even(state.seq->rows, places);
}

// Nodes of a sequence's attention in one layer: where heads are even, and in four groups, of one token and of several.
constexpr uint32_t EVEN_NODES = 24, UNEVEN_NODES = 112, SEVERAL_NODES = 208;

// Pieces in which a layer's attention is added up, of each of the sequences in one batch.
static int32_t summing_parts(size_t sequences) {
    constexpr size_t PARTS = 8;
    return (int32_t) std::max<size_t>(1, PARTS / sequences);
}

// Of all sequences in one batch, in a layer.
uint32_t kvedge_cache::summing_nodes(size_t sequences) const {
    int32_t most = 0;
    for (size_t l = 0; l < shapes.size(); l++) {
        most = places[l] ? std::max(most, kvedge::summing_nodes(shapes[l])) : most;
    }
    return (uint32_t) (most * summing_parts(sequences)) * (uint32_t) sequences;
}

uint32_t kvedge_cache::device_nodes() const {
    constexpr uint32_t MOST_EVEN = 16;  // sequences in one batch
    const uint32_t     n         = ctx ? std::min(llama_n_seq_max(ctx), MOST_EVEN) : 0;
    return n > 0 ? device_layers() * (SEVERAL_NODES + EVEN_NODES * (n - 1) + std::max(summing_nodes(1), summing_nodes(n))) : 0;
}

// Which layers lie on devices is known when graphs were reserved once; theirs are larger.
int32_t kvedge_cache::set_provider() {
    const int32_t code   = llama_set_attn_provider(ctx, &provider);
    provider.extra_nodes = device_nodes();
    if (code != 0 || provider.extra_nodes == 0) {
        return code;
    }
    llama_set_attn_provider(ctx, nullptr);
    return llama_set_attn_provider(ctx, &provider);
}

bool kvedge_cache::fits_devices(const Run & run, bool even) const {
    const SequenceState & state = *run.state;
    const Storage & stored = state.seq->rows.storage();  // of a file, its own
    if (run.request || run.wanted.queries || run.wanted.moments >= 0 || run.wanted.peaks || watching || state.streaming ||
        is_rotated(stored.k) || is_rotated(stored.v) || !follow_each_other(run.index) ||
        (run.score && state.seq->rows.even_rows() != 0)) {
        return false;
    }
    const bool sunk = std::any_of(sinks.begin(), sinks.end(), [](const auto & s) { return !s.empty(); });
    if (even) {
        return !run.wanted.attention() || !sunk;
    }
    const bool reads = run.index.size() == 1 ||
                       std::all_of(places.begin(), places.end(), [](auto * place) { return !place || reads_several(place); });
    return reads && !run.wanted.attention() && !sunk;
}

bool kvedge_cache::report_full(const GraphRows & device, int32_t n) {
    const std::string what = "device " + device.full_device() + " has no memory for the keys and values of " + std::to_string(n) +
                             " tokens; put fewer layers on it, or keep rows on the host";
    report(KVEDGE_E_MEMORY, what.c_str());
    return false;
}

// Fetches rows for a ubatch, and reports it where there is no memory for them.
bool kvedge_cache::needed_on_host(SequenceState & state) {
    if (to_host(state)) {
        return true;
    }
    report(KVEDGE_E_MEMORY, "no memory on the host for keys and values that lie on devices");
    return false;
}

// A prompt's rows are plain until it is compressed.
bool kvedge_cache::to_device(SequenceState & state, bool prompt) {
    const GraphRows::Form form = { prompt ? storage.plain() : storage, !state.kept.empty() };
    if (state.device && state.device->form() == form) {
        return true;
    }
    if (state.device && prompt && state.device->form().dropping == form.dropping) {  // and they are quantised
        llama_synchronize(ctx);
        if (state.device->make_plain(threads())) {
            return true;
        }
    }
    if (!needed_on_host(state)) {
        return false;
    }
    auto device = std::make_shared<GraphRows>(shapes, places, form, stamps);
    if (!device->load(state.seq->rows, threads())) {
        return report_full(*device, state.seq->rows.n_tokens() + std::max(1, state.expected));
    }
    state.device = std::move(device);
    return true;
}

bool kvedge_cache::to_host(SequenceState & state) {
    if (!state.device) {
        return true;
    }
    if (ctx) {
        llama_synchronize(ctx);
    }
    running.clear();
    read_queries(state);
    read_sums(state);
    if (!state.device->fetch(state.seq->rows, threads())) {
        return false;
    }
    state.device.reset();
    return true;
}

bool kvedge_cache::place_runs() {
    const uint32_t layers = device_layers();
    if (layers == 0) {
        return true;
    }
    uint32_t nodes = 0;  // in each layer
    on_devices     = std::all_of(runs.begin(), runs.end(), [&](const auto & run) {
        const bool as_one = even(*run->state);
        nodes += as_one ? EVEN_NODES : run->index.size() == 1 ? UNEVEN_NODES : SEVERAL_NODES;
        nodes += run->wanted.attention() ? summing_nodes(runs.size()) / (uint32_t) runs.size() : 0;
        return nodes * layers <= provider.extra_nodes && fits_devices(*run, as_one);
    });
    for (auto & run : runs) {
        if (!on_devices && !needed_on_host(*run->state)) {
            return false;
        }
        if (on_devices && !to_device(*run->state, run->prompt)) {
            return false;
        }
        run->device = run->state->device;
    }
    return true;
}

bool kvedge_cache::reserve_on_device(Run & run) {
    const auto n = (int32_t) run.index.size();
    const Summed summed = { run.wanted.sums, run.wanted.squares, run.wanted.entropy };
    const Incoming incoming = { n, std::max(n, run.state->expected), run.wanted.window, summed,
                                run.state->seq->rows.pending_length(), summing_parts(runs.size()) };
    if (!run.device->may_follow(incoming)) {
        wait();
    }
    if (!run.device->keeps_queries(incoming)) {
        read_queries(*run.state);
    }
    if (!run.device->keeps_sums(incoming)) {
        read_sums(*run.state);
    }
    return run.device->reserve(incoming, threads()) || report_full(*run.device, run.state->seq->rows.n_tokens() + incoming.follow);
}

// 1: the graph must be built anew.
int kvedge_cache::finish_begin() {
    wanted_graph.clear();
    for (const auto & run : runs) {
        if (run->device) {
            wanted_graph.push_back(run->device->signature());
        }
    }
    owner.go_on();
    return wanted_graph == built_graph ? 0 : 1;
}

ggml_tensor * kvedge_cache::build_on_device(const llama_attn_provider_layer & layer, size_t at) {
    const bool meant = on_devices && !runs.empty() && layer.q->ne[2] == n_tokens;  // llama.cpp reserves memory with other graphs, too
    built_graph      = meant ? wanted_graph : std::vector<GraphRows::Signature>();
    if (layer.sinks && sinks[at].empty() && layer.sinks->buffer) {
        sinks[at].resize((size_t) ggml_nelements(layer.sinks));
        ggml_backend_tensor_get(layer.sinks, sinks[at].data(), 0, ggml_nbytes(layer.sinks));
    }
    ggml_tensor * out = nullptr;
    for (size_t r = 0; meant && r < runs.size(); r++) {
        const auto n    = (int64_t) runs[r]->index.size();
        const auto part = [&](ggml_tensor * x) {
            return runs.size() == 1 ? x : ggml_view_3d(layer.ctx, x, x->ne[0], x->ne[1], n, x->nb[1], x->nb[2], (size_t) runs[r]->index[0] * x->nb[2]);
        };
        const GraphLayer in = { layer.ctx, part(layer.q), part(layer.k), part(layer.v), layer.sinks, layer.scale, layer.softcap };
        ggml_tensor *    of = runs[r]->device->attend(in, at);
        out                 = out ? ggml_concat(layer.ctx, out, of, 1) : of;
    }
    return out;
}

void kvedge_cache::note_queries(SequenceState & state, size_t l, int32_t n, const std::vector<float> & queries) {
    AttendJob job{};
    job.rows    = &state.seq->rows;
    job.layer   = (int32_t) l;
    job.n       = n;
    job.q       = queries.data();
    job.q_head  = (size_t) shapes[l].d_k;
    job.q_token = job.q_head * (size_t) shapes[l].n_heads;
    job.scale   = ops[l]->scale;
    job.sinks   = sinks[l].empty() ? nullptr : sinks[l].data();
    record_window(job, state.seq->observed, 0, 1);
}

void kvedge_cache::note_sums(SequenceState & state, size_t l, int32_t rows, const AttentionSums & sums) {
    Observed &   to    = state.seq->observed;
    const auto   heads = (size_t) shapes[l].n_heads_kv;
    const double share = (double) shapes[l].n_heads / (double) heads;
    const auto   add   = [&](Bulk<double> & into, int32_t capacity, const std::vector<float> & from, double by) {
        for (size_t h = 0; h < heads && !from.empty() && !into.empty(); h++) {
            for (size_t r = 0; r < (size_t) std::min(rows, capacity); r++) {
                into[h * (size_t) capacity + r] += from[h * (size_t) rows + r] / by;
            }
        }
    };
    if (to.has_sums()) {
        ColumnSums & cs = to.sums(l);
        add(cs.sums, cs.capacity, sums.columns, share);
        add(cs.squares, cs.capacity, sums.squares, share * share);
    }
    for (size_t h = 0; h < sums.entropy.size() && !to.entropies().empty(); h++) {
        to.entropies(l)[h] -= sums.entropy[h];
    }
}

uint64_t kvedge_cache::read_queries(SequenceState & state) {
    if (!state.device || !state.device->left_queries()) {
        return 0;
    }
    wait();
    const LastQueries last = state.device->read_queries();
    for (size_t l = 0; l < places.size() && state.seq->observed.has_windows(); l++) {
        if (places[l]) {
            note_queries(state, l, last.n, last.layers[l]);
        }
    }
    return last.fetched;
}

uint64_t kvedge_cache::read_sums(SequenceState & state) {
    if (!state.device || !state.device->left_sums()) {
        return 0;
    }
    wait();
    const PromptSums sums = state.device->read_sums();
    for (size_t l = 0; l < places.size(); l++) {
        if (places[l]) {
            note_sums(state, l, sums.rows, sums.layers[l]);
        }
    }
    return sums.fetched;
}

void kvedge_cache::wait() {
    if (!running.empty() && ctx) {
        llama_synchronize(ctx);
    }
    running.clear();
}

// While a graph runs the next one is built. Its inputs are others, and the scheduler waits with its own for the end of the
// graph; but where layers lie on several devices it may have more than two graphs on their way.
void kvedge_cache::begin_another() {
    for (const auto & run : runs) {
        if (run->device && std::find(running.begin(), running.end(), run->device) == running.end()) {
            running.push_back(run->device);
        }
    }
    runs.clear();
    if (!one_at_a_time()) {
        wait();
    }
}

bool kvedge_cache::one_at_a_time() const {
    int32_t n = 0;  // devices that layers may lie on
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        const auto type = ggml_backend_dev_type(ggml_backend_dev_get(i));
        n += type != GGML_BACKEND_DEVICE_TYPE_CPU && type != GGML_BACKEND_DEVICE_TYPE_ACCEL;
    }
    const bool same = std::all_of(places.begin(), places.end(), [&](auto * place) { return place && place == places[0]; });
    return n <= 1 || (same && (int32_t) shapes.size() == model_layers);
}

void kvedge_cache::settle() {
    if (std::any_of(runs.begin(), runs.end(), [](const auto & run) { return run->device != nullptr; })) {
        begin_another();
    }
    wait();
}

kvedge_status kvedge::rows_at_hand(const kvedge_cache & kv, const SequenceState & state, kvedge_error * err) {
    // where rows lie is nothing that a caller sees
    const_cast<kvedge_cache &>(kv).settle();
    if (const_cast<kvedge_cache &>(kv).to_host(const_cast<SequenceState &>(state))) {
        return KVEDGE_OK;
    }
    return fail(err, KVEDGE_E_MEMORY, "no memory on the host for the keys and values of the sequence, which lie on a device");
}

extern "C" kvedge_status kvedge_expect(kvedge_cache * kv, int32_t seq_id, int32_t n_tokens, kvedge_error * err) {
    return claimed(kv, seq_id >= 0 && n_tokens >= 0, "kvedge_expect: cache is NULL, or a number is negative", "announce tokens", err, [&] {
        kv->open(seq_id).expected = n_tokens;
        return ok(err);
    });
}
