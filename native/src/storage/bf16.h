// The upper half of float32.

#pragma once

#include "backend/format.h"

namespace kvedge::storage {

struct bf16 : Plain<2> {
    static constexpr int32_t number = 1;
};

}  // namespace kvedge::storage
