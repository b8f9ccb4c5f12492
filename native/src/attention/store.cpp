#include "attention/attention.h"
#include "kernels/kernels.h"
#include "store/store.h"

namespace kvedge {

void store_task(const StoreJob & job, int32_t ith, int32_t nth) {
    const LayerShape & shape = job.rows->shapes()[(size_t) job.layer];
    const Storage      plain = job.rows->storage().plain();
    const int64_t      items = (int64_t) job.n * shape.n_heads_kv;
    const int64_t      last  = items * (ith + 1) / nth;
    for (int64_t i = items * ith / nth; i < last; i++) {
        const auto   t    = (int32_t) (i / shape.n_heads_kv);
        const auto   head = (int32_t) (i % shape.n_heads_kv);
        const auto   from = (size_t) (job.index ? job.index[t] : t);
        const auto   at   = job.rows->place_from_end(t, job.n);
        kernels().from_f32(plain.k, job.k + from * job.k_token + (size_t) head * job.k_head, k_row(at, job.layer, head), (size_t) shape.d_k);
        kernels().from_f32(plain.v, job.v + from * job.v_token + (size_t) head * job.v_head, v_row(at, job.layer, head), (size_t) shape.d_v);
    }
}

}  // namespace kvedge
