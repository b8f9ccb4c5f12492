// Operations of kvedge in a backend's own library (cuda/, cpu/). Each is a FLASH_ATTN_EXT with a src[5], and op_params[OWN_KIND]
// says which one it is; patch 0012 hands it to `ggml_cuda_ragged` or `ggml_cpu_ragged`, which own.cu and own.cpp set. Entries
// of op_params behind OWN_KIND belong to the operation.

#pragma once

enum OwnKind : int { OWN_RAGGED = 0, OWN_KINDS };

constexpr int OWN_KIND = 4;  // flash attention has the entries before it
