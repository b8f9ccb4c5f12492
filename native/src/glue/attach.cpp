// The cache's C interface: attach, detach, plans and statistics.

#include "plan/profile.h"
#include "plan/storage.h"
#include "system/structs.h"
#include "compress/turning.h"
#include "glue/calls.h"
#include "glue/projection.h"

#include <algorithm>
#include <chrono>
#include <thread>

using namespace kvedge;

namespace {

kvedge_cache & self(void * user_data) { return *(kvedge_cache *) user_data; }

// Runs a call from llama.cpp, through whose C++ code nothing may be thrown. Returns `failed` if the cache is busy or call() throws.
template <class T, class F> T guarded(void * user_data, T failed, const F & call) noexcept {
    const HandleLock lock(self(user_data).guard, true);
    if (!lock) {
        self(user_data).context.refused = true;
        return failed;
    }
    try {
        return call(self(user_data));
    } catch (...) {
        kvedge_error now{};
        caught(&now, "decode the next tokens");
        self(user_data).context.report(now.status, now.message);
        return failed;
    }
}

// Like guarded(), for calls between two ubatches: the last ubatch is over, even if it was given up.
template <class T, class F> T guarded_between(void * user_data, T failed, const F & call) {
    return guarded(user_data, failed, [&](kvedge_cache & c) {
        c.ubatch.end(false);
        c.guard.end_hold();
        return call(c);
    });
}

llama_attn_provider make_provider(kvedge_cache * kv) {
    llama_attn_provider p{};
    p.user_data  = kv;
    p.build_attn = [](void * u, const llama_attn_provider_layer * layer) {
        return guarded(u, (ggml_tensor *) nullptr, [&](kvedge_cache & c) { return c.build_attn(*layer); });
    };
    p.ubatch_begin = [](void * u, const llama_attn_provider_ubatch * ubatch) {
        return guarded_between(u, -1, [&](kvedge_cache & c) { return c.ubatch_begin(*ubatch); });
    };
    p.ubatch_end = [](void * u, bool computed) {
        self(u).ubatch.end(computed);
        self(u).guard.end_hold();
    };
    p.clear = [](void * u) {
        guarded_between(u, false, [](kvedge_cache & c) {
            c.clear();
            return true;
        });
    };
    p.seq_rm = [](void * u, llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
        return guarded_between(u, false, [&](kvedge_cache & c) {
            c.seq_rm(seq_id, p0, p1);
            return true;
        });
    };
    p.seq_cp = [](void * u, llama_seq_id from, llama_seq_id to, llama_pos p0, llama_pos p1) {
        return guarded_between(u, false, [&](kvedge_cache & c) { return c.seq_cp(from, to, p0, p1); });
    };
    p.seq_keep = [](void * u, llama_seq_id seq_id) {
        guarded_between(u, false, [&](kvedge_cache & c) {
            c.seq_keep(seq_id);
            return true;
        });
    };
    p.seq_move = [](void * u) {
        guarded_between(u, false, [](kvedge_cache & c) {
            return c.context.deny(KVEDGE_E_UNSUPPORTED, "llama_memory_seq_add and llama_memory_seq_div cannot change positions in a kvedge "
                                                        "cache; use kvedge_renumber to make positions smaller");
        });
    };
    p.release  = [](void * u) { self(u).context.llama = nullptr; };
    return p;
}

bool holds_tokens(llama_context * ctx) {
    for (uint32_t s = 0; s < llama_n_seq_max(ctx); s++) {
        if (llama_memory_seq_pos_max(llama_get_memory(ctx), (llama_seq_id) s) >= 0) {
            return true;
        }
    }
    return false;
}

// Decides on the rotation of rows, once their places are known. AUTO rotates nothing if a device holds rows, which it reads as they are.
kvedge_status rotate_rows(kvedge_cache & kv, kvedge_error * err) {
    const auto asked = kv.devices.rotate;
    const bool off   = asked == KVEDGE_ROTATE_AUTO && kv.layers.on_devices() > 0;
    return rotate_storage(kv.sequences.storage, off ? KVEDGE_ROTATE_OFF : asked, kv.layers.shapes, err);
}

// Attaches the provider. known: output, whether the context has the provider now.
kvedge_status take_over(kvedge_cache & kv, bool & known, kvedge_error * err) {
    const int32_t code = kv.devices.attach();
    known              = code == 0 || code == -2;  // -2: llama.cpp noticed the error after it took the provider
    switch (code) {
        case 0:  break;
        case -2: return fail(err, KVEDGE_E_MEMORY, "llama.cpp could not reserve its compute buffers; free memory, or use a smaller n_ctx "
                             "or n_ubatch");
        case -3: return fail(err, KVEDGE_E_STATE, "the context already has an attention provider; detach that provider first");
        default: return fail(err, KVEDGE_E_NOTHING, "this model has no KV cache that kvedge can compress; use the context without kvedge");
    }
    kvedge_status status = kv.context.error.status;  // of a layer that llama.cpp asked for and that failed
    if (status != KVEDGE_OK) {
        fail(err, status, "%s", kv.context.error.message);
    }
    for (const auto & s : kv.layers.shapes) {
        status = status == KVEDGE_OK ? check_storage(kv.sequences.storage, s.d_k, s.d_v, err) : status;
    }
    if (!kv.layers.shapes.empty() && !kv.layers.unread && status == KVEDGE_OK) {
        return rotate_rows(kv, err);
    }
    if (status != KVEDGE_OK) {
        return status;
    }
    if (kv.layers.declined && !kv.layers.unread) {
        return fail(err, KVEDGE_E_NOTHING, "kvedge cannot store the keys and values of this model: the head size is not a multiple of 8 up "
                    "to %d, or the model adds a bias (ALiBi) to the attention logits", MAX_HEAD_SIZE);
    }
    return kv.layers.unread ? fail(err, KVEDGE_E_NOTHING, "some layers of this model read the keys and values of another layer, %s",
                                   kv.layers.unread)
                        : fail(err, KVEDGE_E_NOTHING, "this model has no full-attention layer; there is nothing to compress");
}

// A cache whose context knows the provider. Detaches the provider, unless the caller takes the cache.
struct Attaching {
    explicit Attaching(llama_context * ctx) : kv(std::make_unique<kvedge_cache>()) { kv->context.llama = ctx; }
    ~Attaching() {
        if (kv && known) {
            llama_set_attn_provider(kv->context.llama, nullptr);
        }
    }
    std::unique_ptr<kvedge_cache> kv;
    bool                          known = false;
};

// Checks that the model has what the plan's stages need: profiles, rotations, projections.
kvedge_status check_model(const kvedge_cache & kv, const kvedge_plan & plan, kvedge_error * err) {
    const auto status = check_profiles(plan, kv.layers.shapes, kv.layers.n_model, err);
    const auto turning = status == KVEDGE_OK ? check_rotations(plan, kv.layers.shapes, *kv.layers.rotations, err) : status;
    return turning == KVEDGE_OK ? check_projections(plan, kv.layers.shapes, kv.layers.projections.get(), err) : turning;
}

kvedge_status check_plan(const kvedge_cache & kv, const kvedge_plan & plan, kvedge_error * err) {
    const auto status = kvedge_plan_check(&plan, err);
    return status == KVEDGE_OK ? check_model(kv, plan, err) : status;
}

}  // namespace

extern "C" kvedge_status kvedge_options_init(kvedge_options * options, size_t struct_size, kvedge_error * err) try {
    return write_struct(DEFAULT_OPTIONS, options, struct_size)
               ? ok(err)
               : fail(err, KVEDGE_E_ARGUMENT, "kvedge_options_init: options is NULL, or struct_size is too small");
} catch (...) {
    return caught(err, "fill the options");
}

extern "C" kvedge_status kvedge_attach(
    llama_context * ctx, const kvedge_plan * plan, const kvedge_options * options, kvedge_cache ** out, kvedge_error * err) try {
    if (!ctx || !out) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_attach: ctx or out is NULL");
    }
    *out             = nullptr;
    kvedge_options o = DEFAULT_OPTIONS;
    Storage        storage;
    if (!read_options(options, o) || !make_storage(o.type_k, o.type_v, storage)) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_attach: options are invalid or of a newer kvedge.h; fill options with "
                    "kvedge_options_init() first");
    }
    if (plan) {
        if (const auto status = kvedge_plan_check(plan, err); status != KVEDGE_OK) {
            return status;
        }
    }
    if (!llama_get_memory(ctx)) {
        return fail(err, KVEDGE_E_NOTHING, "this model has no KV cache; there is nothing to compress");
    }
    if (holds_tokens(ctx)) {
        return fail(err, KVEDGE_E_STATE, "the context holds tokens; attach before the first decode, or clear the memory of the context "
                    "first");
    }
    Attaching attaching(ctx);
    auto &    kv      = attaching.kv;
    kv->sequences.plan          = plan ? *plan : full_plan();
    kv->sequences.storage       = storage;
    kv->sequences.auto_compress = o.auto_compress;
    kv->devices.rotate          = o.rotate;
    kv->devices.allowed         = o.devices;
    kv->context.n_threads       = o.n_threads;
    kv->context.provider        = make_provider(kv.get());
    if (const auto status = take_over(*kv, attaching.known, err); status != KVEDGE_OK) {
        return status;
    }
    kv->layers.n_model     = llama_model_n_layer(llama_get_model(ctx));
    kv->layers.projections = std::make_shared<Projections>(model_weights(llama_get_model(ctx), kv->layers.shapes));
    if (const auto status = check_model(*kv, kv->sequences.plan, err); status != KVEDGE_OK) {
        return status;
    }
    *out = kv.release();
    return ok(err);
} catch (...) {
    return caught(err, "attach to the context");
}

extern "C" void kvedge_detach(kvedge_cache * kv) try {
    while (kv && !kv->guard.enter()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (kv && kv->context.llama) {
        llama_set_attn_provider(kv->context.llama, nullptr);
    }
    delete kv;
} catch (...) {
}

extern "C" kvedge_status kvedge_set_plan(kvedge_cache * kv, const kvedge_plan * plan, kvedge_error * err) {
    return claimed(kv, plan, "kvedge_set_plan: cache or plan is NULL", "set the plan", err, [&] {
        if (const auto status = check_plan(*kv, *plan, err); status != KVEDGE_OK) {
            return status;
        }
        kvedge_plan copy = *plan;
        std::swap(kv->sequences.plan, copy);
        return ok(err);
    });
}

extern "C" kvedge_status kvedge_set_sequence_plan(
    kvedge_cache * kv, int32_t seq_id, const kvedge_plan * plan, kvedge_error * err) {
    return claimed(kv, true, "kvedge_set_sequence_plan: cache is NULL", "set the plan", err, [&] {
        const auto there  = check_sequence(*kv, seq_id, err);
        const auto status = there == KVEDGE_OK && plan ? check_plan(*kv, *plan, err) : there;
        if (status == KVEDGE_OK) {
            kv->sequences.set_plan(seq_id, plan);
        }
        return status;
    });
}

extern "C" kvedge_status kvedge_set_auto_compress(kvedge_cache * kv, bool on, kvedge_error * err) {
    return claimed(kv, true, "kvedge_set_auto_compress: cache is NULL", "switch automatic compression", err, [&] {
        kv->sequences.auto_compress = on;
        return ok(err);
    });
}

extern "C" kvedge_status kvedge_expect(kvedge_cache * kv, int32_t seq_id, int32_t n_tokens, kvedge_error * err) {
    return claimed(kv, n_tokens >= 0, "kvedge_expect: cache is NULL, or n_tokens is negative", "announce tokens", err, [&] {
        const auto status = check_sequence(*kv, seq_id, err);
        if (status == KVEDGE_OK) {
            kv->sequences.open(seq_id).expected = n_tokens;
        }
        return status;
    });
}

extern "C" kvedge_status kvedge_compress(kvedge_cache * kv, int32_t seq_id, kvedge_error * err) {
    return in_context(kv, true, "kvedge_compress: cache is NULL", "compress the cache", err, [&] {
        SequenceState * state = kv->sequences.find(seq_id);
        if (!state) {
            return ok(err);
        }
        if (state->verified) {
            return fail_verifying(err);
        }
        kv->context.synchronize();
        kv->finish_graphs();
        return kv->compressor.compress(*state, err);
    });
}

extern "C" kvedge_status kvedge_take_error(kvedge_cache * kv, kvedge_error * err) {
    return claimed(kv, true, "kvedge_take_error: cache is NULL", "report an error", err, [&] {
        kvedge_error first = kv->context.error;
        kv->context.error  = {};
        kv->context.denied = false;
        if (kv->context.refused.exchange(false) && first.status == KVEDGE_OK) {
            fail_busy(&first);
        }
        if (err) {
            *err = first;
        }
        return first.status;
    });
}

static void tell_device_work(const SequenceState & state, kvedge_stats & out) {
    const DeviceWork & work  = state.device_work;
    out.device_fetched_bytes = work.to_host;
    out.device_sent_bytes    = work.to_device;
    out.device_operations    = work.operations;
    out.device_measure_us    = work.measure_us;
    out.device_choose_us     = work.choose_us;
    out.device_gather_us     = work.gather_us;
    out.device_merge_us      = work.merge_us;
    out.device_upload_us     = work.upload_us;
    out.device_compressed    = work.operations > 0 && state.device_problem.empty();
}

extern "C" kvedge_status kvedge_get_stats(const kvedge_cache * kv, int32_t seq_id, kvedge_stats * out, kvedge_error * err) {
    return claimed(kv, out, "kvedge_get_stats: cache or out is NULL", "fill the statistics", err, [&] {
        kvedge_stats now{};
        const auto & shapes = kv->layers.shapes;
        now.n_layers        = (int32_t) shapes.size();
        now.n_heads_kv      = shapes.empty() ? 0 : shapes[0].n_heads_kv;
        if (const SequenceState * s = kv->sequences.find(seq_id)) {
            const auto & image  = s->seq->rows.contents().image;
            now.n_tokens       = s->seq->rows.n_tokens();
            now.n_image_tokens = (int32_t) std::count(image.begin(), image.end(), 1);
            now.n_compressions = s->n_compressions;
            now.n_pending      = s->seq->rows.pending_length();
            now.bytes          = s->row_bytes();
            now.device_bytes   = s->device_bytes();
            now.index_bytes    = index_bytes(s->seq->rows);
            now.score_bytes    = s->score_bytes();
            now.before_bytes   = s->before_bytes;
            now.after_bytes    = s->after_bytes;
            now.peak_bytes     = s->peak_bytes;
            now.compress_us    = s->compress_us;
            now.n_unfitted     = s->n_unfitted;
            now.n_scant        = s->n_scant;
            now.whole_rounded  = s->whole.seq && has_whole(s->whole.seq->rows) ? 1 : 0;
            now.whole_bytes      = s->whole.bytes();
            now.whole_file_bytes = s->whole.file_bytes();
            tell_device_work(*s, now);
        }
        return write_struct(now, out, out->struct_size)
                   ? ok(err)
                   : fail(err, KVEDGE_E_ARGUMENT, "kvedge_get_stats: out->struct_size is not set");
    });
}

extern "C" int32_t kvedge_layer_id(const kvedge_cache * kv, int32_t i) {
    return asked(kv, -1, [&] { return kv->layers.holds(i) ? kv->layers.shapes[(size_t) i].il : -1; });
}

extern "C" const char * kvedge_layer_device(const kvedge_cache * kv, int32_t i) {
    return asked(kv, (const char *) nullptr, [&] {
        const auto place = kv->layers.holds(i) ? kv->layers.devices[(size_t) i] : nullptr;
        return place ? ggml_backend_dev_name(place) : nullptr;
    });
}

extern "C" const char * kvedge_device_problem(const kvedge_cache * kv, int32_t seq_id) {
    return asked(kv, (const char *) nullptr, [&] {
        const SequenceState * s = kv->sequences.find(seq_id);
        return s && !s->device_problem.empty() ? s->device_problem.text() : nullptr;
    });
}

extern "C" int32_t kvedge_head_length(const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head) {
    return asked(kv, -1, [&] {
        const SequenceState * s = kv->sequences.find(seq_id);
        return s && kv->layers.holds(i, head) ? s->seq->rows.head_length(i, head) : -1;
    });
}

extern "C" kvedge_status kvedge_head_tokens(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head, int32_t * out, int32_t n_out, kvedge_error * err) {
    return claimed(kv, true, "kvedge_head_tokens: cache is NULL", "list the tokens", err, [&] {
        const SequenceState * s = kv->sequences.find(seq_id);
        if (!s || !kv->layers.holds(i, head) || !out) {
            return fail(err, KVEDGE_E_ARGUMENT, "kvedge_head_tokens: the sequence, layer or KV head does not exist");
        }
        const auto tokens = s->seq->rows.head_tokens(i, head);
        const auto status = check_room("kvedge_head_tokens", tokens.size(), "tokens", n_out, err);
        if (status == KVEDGE_OK) {
            std::copy(tokens.begin(), tokens.end(), out);
        }
        return status;
    });
}
