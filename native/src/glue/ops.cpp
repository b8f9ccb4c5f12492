// The operations of a layer in llama.cpp's graph. Each thread of the graph does a part. The operations own nothing.

#include "glue/cache.h"

#include "ggml.h"

#include <algorithm>
#include <cstring>

namespace kvedge {

namespace {

AttendJob make_job(const LayerOp & op, const Run & run, ggml_tensor * dst) {
    const kvedge_cache & kv    = *op.kv;
    const LayerShape &   shape = kv.layers.shapes[(size_t) op.layer];
    const ggml_tensor *  q     = dst->src[0];
    AttendJob            job{};
    job.rows               = &run.state->seq->rows;
    job.layer              = op.layer;
    job.n                  = run.n();
    job.causal             = kv.ubatch.causal;
    job.q                  = (const float *) q->data;
    job.q_head             = q->nb[1] / sizeof(float);
    job.q_token            = q->nb[2] / sizeof(float);
    job.out                = (float *) dst->data;
    job.out_head           = (size_t) shape.d_v;
    job.out_token          = dst->nb[1] / sizeof(float);
    job.index              = run.index.data();
    job.rotation_positions = run.rotation_positions.empty() ? nullptr : run.rotation_positions.data();
    job.scale              = op.scale;
    job.softcap            = shape.softcap;
    job.as_alone           = run.kind == Kind::answer;  // drafts are compared with tokens that come one by one
    job.sinks              = dst->src[2] ? (const float *) dst->src[2]->data : nullptr;
    if (op.reader >= 0) {
        return job;  // scores belong to the layer that has the rows
    }
    job.wanted = run.wanted;
    job.seen   = &run.state->seq->observed;
    job.locks  = kv.working.locks.get();
    job.replay = run.replay;
    job.scored = run.score ? &run.state->seq->rows : nullptr;
    if (run.watch || (run.decode && (run.score || run.wanted.sums()))) {
        TokenWeights & weights = run.state->weights;
        const size_t   at      = run.watch ? (size_t) op.layer : 0;
        job.weights            = weights.weights[at].data();
        job.weights_row        = (size_t) weights.rows[at];
    }
    return job;
}

}  // namespace

void start_op(ggml_tensor * dst, int ith, int /*nth*/, void * layer_op) {
    const LayerOp & op = *(const LayerOp *) layer_op;
    if (ith == 0 && dst->src[0]->ne[2] == op.kv->ubatch.n_tokens) {
        op.kv->ubatch.start_layer(op.kv->layers.shapes[(size_t) op.layer]);
    }
}

void store_op(ggml_tensor * dst, int ith, int nth, void * layer_op) {
    const LayerOp &     op    = *(const LayerOp *) layer_op;
    kvedge_cache &      kv    = *op.kv;
    const LayerShape &  shape = kv.layers.shapes[(size_t) op.layer];
    const ggml_tensor * k     = dst->src[0];
    const ggml_tensor * v     = dst->src[1];
    if (k->ne[2] != kv.ubatch.n_tokens) {
        return;
    }
    if (ith == 0) {
        kv.context.intermediate.note(dst);
        kv.ubatch.start_layer(shape);
    }
    for (auto & run : kv.ubatch.runs) {
        if (run->bounded && run->bounded->failed()) {
            continue;
        }
        StoreJob job{};
        job.rows    = &run->state->seq->rows;
        job.layer   = op.layer;
        job.n       = run->n();
        job.k       = (const float *) k->data;
        job.k_head  = k->nb[1] / sizeof(float);
        job.k_token = k->nb[2] / sizeof(float);
        job.v       = (const float *) v->data;
        job.v_head  = v->nb[1] / sizeof(float);
        job.v_token = v->nb[2] / sizeof(float);
        job.index   = run->index.data();
        store_task(job, ith, nth);
    }
}

void attend_op(ggml_tensor * dst, int ith, int nth, void * layer_op) {
    const LayerOp & op = *(const LayerOp *) layer_op;
    kvedge_cache &  kv = *op.kv;
    if (dst->src[0]->ne[2] != kv.ubatch.n_tokens || kv.ubatch.runs.empty()) {
        if (ith == 0) {
            memset(dst->data, 0, ggml_nbytes(dst));
        }
        return;
    }
    // Threads draw tasks from one counter, which covers all runs of the ubatch.
    int32_t first = 0;
    int32_t task  = -1;
    for (auto & run : kv.ubatch.runs) {
        if (run->bounded && run->bounded->failed()) {
            if (ith == 0) {
                memset(dst->data, 0, ggml_nbytes(dst));
            }
            return;  // a bounded prompt is the only run
        }
        const AttendJob job = make_job(op, *run, dst);
        if (run->wanted.window > 0 && op.reader < 0) {
            record_window(job, run->state->seq->observed, ith, nth);
        }
        const int32_t turners = std::min(nth, (int32_t) kv.working.turning.size());
        if (run->wanted.moments >= 0 && op.reader < 0 && ith < turners) {
            record_moments(job, run->state->seq->observed, run->wanted.moments, ith, turners, kv.working.turning[(size_t) ith]);
        }
        if (!run->decode && (size_t) ith >= kv.working.scratch.size()) {
            return;
        }
        // independent of the threads of this pass: the splits of a head change the last bits of a result
        const int32_t splits = run->decode ? decode_splits(job, kv.ubatch.most_threads) : 0;
        const int32_t n      = run->decode ? decode_tasks(job, splits) : prefill_tasks(job, kv.working.scratch[0]);
        // The thread that finishes the last piece of a bounded prompt's layer compresses the layer, while the other threads wait at the
        // graph's barrier. Pieces are the tasks and every thread's share of the window.
        const auto finish = [&] {
            if (run->bounded && kv.ubatch.finished.fetch_add(1, std::memory_order_acq_rel) + 1 == n + nth) {
                kv.compressor.finish_layer(*run->state, op.layer);
            }
        };
        finish();
        for (;;) {
            if (task < 0) {
                task = kv.ubatch.next_task.fetch_add(1, std::memory_order_relaxed);
            }
            if (task >= first + n) {
                break;
            }
            if (run->decode) {
                decode_task(job, task - first, splits, run->partials);
            } else {
                prefill_task(job, task - first, kv.working.scratch[(size_t) ith]);
            }
            finish();
            task = -1;
        }
        first += n;
    }
}

}  // namespace kvedge
