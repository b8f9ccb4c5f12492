// Devices attend over the rows of a prompt and of an answer, and sum a prompt's attention. Attention whose weights are needed (watched
// tokens, scores of a decode policy) is computed on the host, with the rows fetched. A ubatch attends on devices if all its sequences can.

#include "glue/devices.h"

#include <algorithm>
#include <string>

using namespace kvedge;

namespace {

// Returns the device of the weights that made a tensor; NULL: no weights found.
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

ggml_backend_dev_t Devices::place_of(const llama_attn_provider_layer & layer) const {
    const ggml_backend_dev_t host = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const bool rotates = rotate == KVEDGE_ROTATE_ON && sequences_.storage.quantised();
    if (allowed == KVEDGE_DEVICES_NONE || rotates) {
        return nullptr;
    }
    ggml_backend_dev_t device = device_of(layer.k, 0);
    if (!device || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        device = allowed == KVEDGE_DEVICES_ALL ? host : nullptr;
    }
    return device && attends_to(device, sequences_.storage, layer.k->ne[0], layer.v->ne[0]) ? device : nullptr;
}

bool Devices::even(const SequenceState & state) const {
    if (!state.kept.empty()) {
        return false;
    }
    const bool known = state.device && !state.device->form().dropping;
    return known ? state.device->even() : holds_even(state.seq->rows, layers_.devices);
}

// Graph nodes of a sequence's attention in one layer: even heads; uneven heads, in four groups, with one token; with several tokens.
constexpr uint32_t EVEN_NODES = 24, UNEVEN_NODES = 112, SEVERAL_NODES = 208;

// Returns the number of parts in which a layer's attention is summed, for each sequence of a batch.
static int32_t summing_parts(size_t sequences) {
    constexpr size_t PARTS = 8;
    return (int32_t) std::max<size_t>(1, PARTS / sequences);
}

// Returns the graph nodes that sum the attention of a layer, for all sequences of a batch.
uint32_t Devices::summing_nodes(size_t sequences) const {
    int32_t most = 0;
    for (size_t l = 0; l < layers_.shapes.size(); l++) {
        most = layers_.devices[l] ? std::max(most, kvedge::summing_nodes(layers_.shapes[l])) : most;
    }
    return (uint32_t) (most * summing_parts(sequences)) * (uint32_t) sequences;
}

uint32_t Devices::nodes() const {
    constexpr uint32_t MOST_EVEN = 16;  // sequences in one batch
    const uint32_t     n         = context_.llama ? std::min(llama_n_seq_max(context_.llama), MOST_EVEN) : 0;
    return n > 0 ? (uint32_t) layers_.on_devices() * (SEVERAL_NODES + EVEN_NODES * (n - 1) + std::max(summing_nodes(1), summing_nodes(n))) : 0;
}

// Sets the provider twice if layers lie on devices: these are known after the first time, and their graphs need more nodes.
int32_t Devices::attach() {
    const int32_t code   = llama_set_attn_provider(context_.llama, &context_.provider);
    context_.provider.extra_nodes = nodes();
    if (code != 0 || context_.provider.extra_nodes == 0) {
        return code;
    }
    llama_set_attn_provider(context_.llama, nullptr);
    return llama_set_attn_provider(context_.llama, &context_.provider);
}

bool Devices::fits(const Run & run, bool even) const {
    const SequenceState & state = *run.state;
    const Storage & stored = state.seq->rows.storage();  // a loaded sequence has the types of its file
    if (state.whole_in_use() || run.request || run.wanted.queries || run.wanted.moments >= 0 || run.wanted.peaks ||
        !run.wanted.on_devices() || sequences_.watching || state.streaming ||
        is_rotated(stored.k) || is_rotated(stored.v) || has_whole(state.seq->rows) || !follow_each_other(run.index) ||
        (run.score && even_rows(state.seq->rows) != 0)) {
        return false;
    }
    const bool sums = run.wanted.attention(), sunk = layers_.has_sinks();
    if (even) {
        return !sums || !sunk;
    }
    const auto & devices = layers_.devices;
    const bool   reads   = run.n() == 1 || std::all_of(devices.begin(), devices.end(), [](auto * p) { return !p || reads_several(p); });
    return reads && !sums && !sunk;
}

// Returns whether a message of few tokens attends on the host, which holds all rows before it while whole rows are kept: else these rows
// travel to the device and, for the compression, back. A thread multiplies a token with a head's rows in a tenth of the time in which a bus
// (12 GB/s) carries the rows there and back; a network takes a hundred times as long as the bus.
bool Devices::stays(const Run & run) const {
    constexpr int32_t     TOKENS = 10, FAR = 100;
    const SequenceState & state  = *run.state;
    if (!run.is_prompt() || state.device || state.seq->rows.n_tokens() == 0) {
        return false;
    }
    const int32_t threads = context_.graph_threads();
    for (size_t l = 0; l < layers_.shapes.size(); l++) {
        const LayerShape & shape = layers_.shapes[l];
        if (const auto device = layers_.devices[l]) {
            return run.n() * (shape.n_heads / shape.n_heads_kv) <= threads * TOKENS * (is_far(device) ? FAR : 1);
        }
    }
    return false;
}

bool Devices::report_full(const GraphRows & device, int32_t n) {
    const std::string what = "device " + device.full_device() + " has no memory for the keys and values of " + std::to_string(n) +
                             " tokens; put fewer layers on the device, or keep rows on the host";
    context_.report(KVEDGE_E_MEMORY, what.c_str());
    return false;
}

// Fetches rows for a ubatch. False: no memory, which is reported.
bool Devices::needed_on_host(SequenceState & state) {
    if (to_host(state)) {
        return true;
    }
    context_.report(KVEDGE_E_MEMORY, "no memory on the host to copy keys and values from devices");
    return false;
}

// Sends rows to devices. The rows of a prompt are not quantised until it is compressed. False: no memory, which is reported.
bool Devices::to_device(SequenceState & state, bool prompt) {
    const GraphRows::Form form = { prompt ? sequences_.storage.plain() : sequences_.storage, !state.kept.empty() };
    if (state.device && state.device->form() == form) {
        return true;
    }
    if (state.device && prompt && state.device->form().dropping == form.dropping) {  // the rows are quantised
        context_.synchronize();
        if (state.device->make_plain(context_.threads())) {
            return true;
        }
    }
    if (!needed_on_host(state)) {
        return false;
    }
    auto device = std::make_shared<GraphRows>(layers_.shapes, layers_.devices, form, stamps_, workers_);
    if (!device->load(state.seq->rows, context_.threads())) {
        return report_full(*device, state.seq->rows.n_tokens() + std::max(1, state.expected));
    }
    state.device = std::move(device);
    return true;
}

bool Devices::to_host(SequenceState & state) {
    if (!state.device) {
        return true;
    }
    context_.synchronize();
    running_.clear();
    read_queries(state);
    read_sums(state);
    if (!state.device->fetch(state.seq->rows, context_.threads())) {
        return false;
    }
    state.device.reset();
    return true;
}

bool Devices::place(Runs & runs) {
    const auto layers = (uint32_t) layers_.on_devices();
    if (layers == 0) {
        return true;
    }
    uint32_t nodes = 0;  // in each layer
    active_        = std::all_of(runs.begin(), runs.end(), [&](const auto & run) {
        const bool as_one = even(*run->state);
        nodes += as_one ? EVEN_NODES : run->n() == 1 ? UNEVEN_NODES : SEVERAL_NODES;
        nodes += run->wanted.attention() ? summing_nodes(runs.size()) / (uint32_t) runs.size() : 0;
        return nodes * layers <= context_.provider.extra_nodes && fits(*run, as_one) &&
               !(runs.size() == 1 && stays(*run));
    });
    for (auto & run : runs) {
        if (!active_ && !needed_on_host(*run->state)) {
            return false;
        }
        if (active_ && !to_device(*run->state, run->is_prompt())) {
            return false;
        }
        run->device = run->state->device;
    }
    return true;
}

bool Devices::reserve(Run & run, size_t n_runs) {
    const int32_t n = run.n();
    const Summed summed = { run.wanted.columns[column::sums], run.wanted.columns[column::squares], run.wanted.entropy };
    const Incoming incoming = { n, std::max(n, run.state->expected), run.wanted.window, summed,
                                run.state->seq->rows.pending_length(), summing_parts(n_runs) };
    if (!run.device->may_follow(incoming)) {
        wait();
    }
    if (!run.device->queries.keeps(incoming)) {
        read_queries(*run.state);
    }
    if (!run.device->sums.keeps(incoming)) {
        read_sums(*run.state);
    }
    return run.device->reserve(incoming, context_.threads()) ||
           report_full(*run.device, run.state->seq->rows.n_tokens() + incoming.announced);
}

bool Devices::begin_graph(const Runs & runs) {
    wanted_graph_.clear();
    for (const auto & run : runs) {
        if (run->device) {
            wanted_graph_.push_back(run->device->signature());
        }
    }
    return wanted_graph_ != built_graph_;
}

ggml_tensor * Devices::build(const llama_attn_provider_layer & layer, size_t at, const Runs * of) {
    const bool meant = active_ && of && !of->empty();
    built_graph_     = meant ? wanted_graph_ : std::vector<GraphRows::Signature>();
    if (layer.sinks && layers_.sinks[at].empty() && layer.sinks->buffer) {
        layers_.sinks[at].resize((size_t) ggml_nelements(layer.sinks));
        ggml_backend_tensor_get(layer.sinks, layers_.sinks[at].data(), 0, ggml_nbytes(layer.sinks));
    }
    ggml_tensor * out = nullptr;
    for (size_t r = 0; meant && r < of->size(); r++) {
        const Run & run  = *(*of)[r];
        const auto  part = [&](ggml_tensor * x) {
            const size_t first = (size_t) run.index[0] * x->nb[2];
            return of->size() == 1 ? x : ggml_view_3d(layer.ctx, x, x->ne[0], x->ne[1], run.n(), x->nb[1], x->nb[2], first);
        };
        const GraphLayer in = { layer.ctx, part(layer.q), part(layer.k), part(layer.v), layer.sinks, layer.scale, layer.softcap };
        ggml_tensor *    got = run.device->attend(in, at);
        out                  = out ? ggml_concat(layer.ctx, out, got, 1) : got;
    }
    return out;
}

void Devices::note_queries(SequenceState & state, size_t l, int32_t n, const std::vector<float> & queries) {
    AttendJob job{};
    job.rows    = &state.seq->rows;
    job.layer   = (int32_t) l;
    job.n       = n;
    job.q       = queries.data();
    job.q_head  = (size_t) layers_.shapes[l].d_k;
    job.q_token = job.q_head * (size_t) layers_.shapes[l].n_heads;
    job.scale   = layers_.ops[l]->scale;
    job.sinks   = layers_.sinks[l].empty() ? nullptr : layers_.sinks[l].data();
    record_window(job, state.seq->observed, 0, 1);
}

void Devices::note_sums(SequenceState & state, size_t l, int32_t rows, const AttentionSums & sums) {
    Observed &   to    = state.seq->observed;
    const auto   heads = (size_t) layers_.shapes[l].n_heads_kv;
    const double share = (double) layers_.shapes[l].n_heads / (double) heads;
    const auto   add   = [&](Bulk<double> & into, int32_t capacity, const std::vector<float> & from, double by) {
        for (size_t h = 0; h < heads && !from.empty() && !into.empty(); h++) {
            for (size_t r = 0; r < (size_t) std::min(rows, capacity); r++) {
                into[h * (size_t) capacity + r] += from[h * (size_t) rows + r] / by;
            }
        }
    };
    if (to.have().sums()) {
        Columns & into = to.layer(l).columns;
        add(into.sums(), into.capacity, sums.columns, share);
        add(into.of[column::squares], into.capacity, sums.squares, share * share);
    }
    for (size_t h = 0; h < sums.entropy.size() && to.have().entropy; h++) {
        to.layer(l).entropy[h] -= sums.entropy[h];
    }
}

uint64_t Devices::read_queries(SequenceState & state) {
    if (!state.device || !state.device->queries.left()) {
        return 0;
    }
    wait();
    const LastQueries last = state.device->queries.read();
    for (size_t l = 0; l < layers_.devices.size() && state.seq->observed.have().window > 0; l++) {
        if (layers_.devices[l]) {
            note_queries(state, l, last.n, last.layers[l]);
        }
    }
    return last.fetched;
}

uint64_t Devices::read_sums(SequenceState & state) {
    if (!state.device || !state.device->sums.left()) {
        return 0;
    }
    wait();
    const PromptSums sums = state.device->sums.read();
    for (size_t l = 0; l < layers_.devices.size(); l++) {
        if (layers_.devices[l]) {
            note_sums(state, l, sums.rows, sums.layers[l]);
        }
    }
    return sums.fetched;
}

void Devices::wait() {
    if (!running_.empty()) {
        context_.synchronize();
    }
    running_.clear();
}

// Lets the graph run while the next graph is built. The next graph has other inputs, and the scheduler fills its own inputs only when the
// graph has ended; but with layers on several devices the scheduler may have more than two graphs on their way.
void Devices::run_on(const Runs & runs) {
    for (const auto & run : runs) {
        if (run->device && std::find(running_.begin(), running_.end(), run->device) == running_.end()) {
            running_.push_back(run->device);
        }
    }
    if (!one_at_a_time()) {
        wait();
    }
}

bool Devices::one_at_a_time() const {
    int32_t n = 0;  // devices that layers may lie on
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        const auto type = ggml_backend_dev_type(ggml_backend_dev_get(i));
        n += type != GGML_BACKEND_DEVICE_TYPE_CPU && type != GGML_BACKEND_DEVICE_TYPE_ACCEL;
    }
    const auto & all = layers_.devices;
    const bool same  = std::all_of(all.begin(), all.end(), [&](auto * place) { return place && place == all[0]; });
    return n <= 1 || (same && layers_.all_of_model());
}

