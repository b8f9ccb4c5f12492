#include "core/stages.h"

#include <cstring>

namespace kvedge {

extern const Scorer       scorer_cumulative, scorer_position, scorer_window, scorer_knorm, scorer_vnorm, scorer_random,
    scorer_mixkv, scorer_dct, scorer_mean;
extern const Allocator    allocator_uniform, allocator_pyramid, allocator_ada, allocator_prefix, allocator_spectral,
    allocator_heads, allocator_entropy;
extern const Reducer      reducer_evict, reducer_averaged, reducer_pivotal, reducer_weighted, reducer_bucket, reducer_position,
    reducer_feature;
extern const DecodePolicy decode_keep_all, decode_fixed_point, decode_ratio, decode_sliding, decode_heavy_hitter;

namespace {

const Scorer * const       SCORERS[]    = { &scorer_cumulative, &scorer_position, &scorer_window,
                                           &scorer_knorm,      &scorer_vnorm,    &scorer_random,
                                           &scorer_mixkv,      &scorer_dct,      &scorer_mean };
const Allocator * const    ALLOCATORS[] = { &allocator_uniform, &allocator_pyramid, &allocator_ada, &allocator_prefix,
                                           &allocator_spectral, &allocator_heads, &allocator_entropy };
const Reducer * const      REDUCERS[]   = { &reducer_evict, &reducer_averaged, &reducer_pivotal, &reducer_weighted,
                                           &reducer_bucket, &reducer_position, &reducer_feature };
const DecodePolicy * const DECODES[]    = { &decode_keep_all, &decode_fixed_point, &decode_ratio, &decode_sliding,
                                           &decode_heavy_hitter };

template <class T, size_t N> const T * find(const T * const (&members)[N], const char * name) {
    for (const T * m : members) {
        if (strcmp(m->name, name) == 0) {
            return m;
        }
    }
    return nullptr;
}

template <class T, size_t N> const char * name_at(const T * const (&members)[N], int32_t i) {
    return i >= 0 && (size_t) i < N ? members[i]->name : nullptr;
}

}  // namespace

const Scorer *       find_scorer(const char * name) { return find(SCORERS, name); }
const Allocator *    find_allocator(const char * name) { return find(ALLOCATORS, name); }
const Reducer *      find_reducer(const char * name) { return find(REDUCERS, name); }
const DecodePolicy * find_decode(const char * name) { return find(DECODES, name); }

}  // namespace kvedge

extern "C" const char * kvedge_stage_name(kvedge_stage stage, int32_t i) try {
    using namespace kvedge;
    switch (stage) {
        case KVEDGE_STAGE_SCORER:    return name_at(SCORERS, i);
        case KVEDGE_STAGE_ALLOCATOR: return name_at(ALLOCATORS, i);
        case KVEDGE_STAGE_REDUCER:   return name_at(REDUCERS, i);
        case KVEDGE_STAGE_DECODE:    return name_at(DECODES, i);
    }
    return nullptr;
} catch (...) {
    return nullptr;
}

extern "C" int32_t kvedge_stage_count(kvedge_stage stage) try {
    int32_t n = 0;
    while (kvedge_stage_name(stage, n)) {
        n++;
    }
    return n;
} catch (...) {
    return 0;
}
