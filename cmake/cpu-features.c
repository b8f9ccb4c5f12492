// The instruction sets that the compiler may use, as one string in the object file (see CpuFeatures.cmake).

const char kvedge_cpu_features[] =
    "kvedge-cpu-features: "
#if defined(__x86_64__) || defined(_M_X64)
    "x86_64"
#elif defined(__aarch64__) || defined(_M_ARM64)
    "aarch64"
#else
    "other"
#endif
#ifdef __SSE3__
    " pni"
#endif
#ifdef __SSSE3__
    " ssse3"
#endif
#ifdef __SSE4_1__
    " sse4_1"
#endif
#ifdef __SSE4_2__
    " sse4_2"
#endif
#ifdef __POPCNT__
    " popcnt"
#endif
#ifdef __AVX__
    " avx"
#endif
#ifdef __AVX2__
    " avx2"
#endif
#ifdef __FMA__
    " fma"
#endif
#ifdef __F16C__
    " f16c"
#endif
#ifdef __BMI__
    " bmi1"
#endif
#ifdef __BMI2__
    " bmi2"
#endif
#ifdef __LZCNT__
    " abm"
#endif
#ifdef __MOVBE__
    " movbe"
#endif
#ifdef __AVX512F__
    " avx512f"
#endif
#ifdef __AVX512CD__
    " avx512cd"
#endif
#ifdef __AVX512BW__
    " avx512bw"
#endif
#ifdef __AVX512DQ__
    " avx512dq"
#endif
#ifdef __AVX512VL__
    " avx512vl"
#endif
#ifdef __AVX512IFMA__
    " avx512ifma"
#endif
#ifdef __AVX512VBMI__
    " avx512vbmi"
#endif
#ifdef __AVX512VBMI2__
    " avx512_vbmi2"
#endif
#ifdef __AVX512VNNI__
    " avx512_vnni"
#endif
#ifdef __AVX512BITALG__
    " avx512_bitalg"
#endif
#ifdef __AVX512VPOPCNTDQ__
    " avx512_vpopcntdq"
#endif
#ifdef __AVX512BF16__
    " avx512_bf16"
#endif
#ifdef __AVX512FP16__
    " avx512_fp16"
#endif
#ifdef __AVXVNNI__
    " avx_vnni"
#endif
#ifdef __GFNI__
    " gfni"
#endif
#ifdef __VAES__
    " vaes"
#endif
#ifdef __VPCLMULQDQ__
    " vpclmulqdq"
#endif
#ifdef __AMX_TILE__
    " amx_tile"
#endif
#ifdef __AMX_INT8__
    " amx_int8"
#endif
#ifdef __AMX_BF16__
    " amx_bf16"
#endif
#ifdef __FMA4__
    " fma4"
#endif
#ifdef __XOP__
    " xop"
#endif
#ifdef __TBM__
    " tbm"
#endif
#ifdef __ARM_FEATURE_DOTPROD
    " asimddp"
#endif
#ifdef __ARM_FEATURE_FP16_VECTOR_ARITHMETIC
    " asimdhp"
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
    " i8mm"
#endif
#ifdef __ARM_FEATURE_BF16
    " bf16"
#endif
#ifdef __ARM_FEATURE_SVE
    " sve"
#endif
#ifdef __ARM_FEATURE_SVE2
    " sve2"
#endif
#ifdef __ARM_FEATURE_SME
    " sme"
#endif
#ifdef __ARM_FEATURE_ATOMICS
    " atomics"
#endif
    ;
