// kvedge's operations (../own.h) on CUDA. Each function computes `dst` on the stream of ctx and returns true; false: unsupported.
// ctx NULL: returns whether `dst` is supported, and computes nothing.

#pragma once

#include "../own.h"

#include "ggml-cuda/common.cuh"

bool kvedge_cuda_ragged(ggml_backend_cuda_context * ctx, const ggml_tensor * dst);
bool kvedge_cuda_nearest(ggml_backend_cuda_context * ctx, const ggml_tensor * dst);
bool kvedge_cuda_joins(ggml_backend_cuda_context * ctx, const ggml_tensor * dst);
bool kvedge_cuda_sums(ggml_backend_cuda_context * ctx, const ggml_tensor * dst);
bool kvedge_cuda_points(ggml_backend_cuda_context * ctx, const ggml_tensor * dst);
bool kvedge_cuda_deviation(ggml_backend_cuda_context * ctx, const ggml_tensor * dst);
bool kvedge_cuda_sum(ggml_backend_cuda_context * ctx, const ggml_tensor * dst);
bool kvedge_cuda_lengths(ggml_backend_cuda_context * ctx, const ggml_tensor * dst);
