// kvedge's operations (../own.h) on the CPU. Each function computes `dst`; all threads of `params` call it together.

#pragma once

#include "../own.h"

#include "ggml-cpu.h"
#include "ggml-cpu/ggml-cpu-impl.h"

void kvedge_cpu_ragged(const ggml_compute_params * params, ggml_tensor * dst);
void kvedge_cpu_nearest(const ggml_compute_params * params, ggml_tensor * dst);
void kvedge_cpu_joins(const ggml_compute_params * params, ggml_tensor * dst);
void kvedge_cpu_sums(const ggml_compute_params * params, ggml_tensor * dst);
void kvedge_cpu_points(const ggml_compute_params * params, ggml_tensor * dst);
void kvedge_cpu_deviation(const ggml_compute_params * params, ggml_tensor * dst);
void kvedge_cpu_sum(const ggml_compute_params * params, ggml_tensor * dst);
void kvedge_cpu_lengths(const ggml_compute_params * params, ggml_tensor * dst);
