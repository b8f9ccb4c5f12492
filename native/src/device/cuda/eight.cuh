// Loads and stores eight neighbouring numbers of a row at a time, and converts them to and from f32.

#pragma once

#include "ggml-cuda/common.cuh"

// Eight neighbouring numbers of a row, in the row's type.
template <typename T> struct Eight {
    uint4 words[sizeof(T) / 2];
};

__device__ __forceinline__ void widen(const Eight<half> & x, float (&out)[8]) {
    const half2 * pairs = (const half2 *) x.words;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = __half22float2(pairs[i]);
        out[2 * i] = two.x, out[2 * i + 1] = two.y;
    }
}

__device__ __forceinline__ void widen(const Eight<nv_bfloat16> & x, float (&out)[8]) {
    const unsigned * pairs = (const unsigned *) x.words;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = __uint_as_float(pairs[i] << 16), out[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ void widen(const Eight<float> & x, float (&out)[8]) {
    const float * all = (const float *) x.words;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        out[i] = all[i];
    }
}

__device__ __forceinline__ void narrow(const float (&x)[8], Eight<half> & out) {
    half2 * pairs = (half2 *) out.words;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        pairs[i] = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
    }
}

__device__ __forceinline__ void narrow(const float (&x)[8], Eight<nv_bfloat16> & out) {
    nv_bfloat162 * pairs = (nv_bfloat162 *) out.words;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        pairs[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    }
}

__device__ __forceinline__ void narrow(const float (&x)[8], Eight<float> & out) {
    float * all = (float *) out.words;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        all[i] = x[i];
    }
}
