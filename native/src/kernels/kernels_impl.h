// The kernels, written once over a vector type V that the including file defines in its unnamed namespace:
//   V::W lanes; V::FEW: most query rows for which plain rows are not packed; V::MR: rows of the q k^T micro-kernel; V::ACC: registers for
//   sums; V::LANES: the order in which hsum4 adds lanes up, pair by pair;
//   load/store/load_first and store_first (n < W lanes; load_first sets the others to a given number)/set1/zero/kept (stays in a
//   register, so that no use loads it again)/fma/fnma (c - a * b)/add/sub/mul/max/round (to an integer)/scale2 (a * 2^n, n integral,
//   a and the result not subnormal)/hsum/hsum4 (of four)/hmax/transpose (of W vectors);
//   load16(Type, ptr) widens W stored values, store_f16 narrows them; load_i8(ptr) widens W signed codes; codes<bits>(ptr, x) widens
//   GROUP codes (Packed) into GROUP / W vectors; set1_f16(ptr) loads a stored scale into all lanes; TURNS_HALVES: whether there is
//   turn_halves, which makes columns of rows of 16-bit numbers.
// Nothing here may come from std:: templates: the linker would merge copies compiled for different processors.

#pragma once

#include "kernels_decode.h"
#include "kernels_fft.h"
#include "kernels_gemm.h"
#include "kernels_quant_decode.h"
#include "kernels_rows.h"

namespace kvedge {
namespace {

constexpr Kernels make_table(
    const char * name, decltype(Kernels::rows_dot) rows_dot = k_any_rows_dot,
    decltype(Kernels::rows_axpy) rows_axpy = k_any_rows_axpy) {
    return { name,          NR,          k_to_f32,        k_from_f32,  k_widen,      k_pack,
             k_gemm_qk,     k_gemm_pv,   k_max,           k_exp_sum,   k_softmax_step, k_exp_dot,
             k_softcap,     k_axpy,      k_add_moments,   k_dot,       rows_dot,     rows_axpy,
             k_band_load,   k_band_filter, k_rotate, V::FEW };
}

}  // namespace
}  // namespace kvedge
