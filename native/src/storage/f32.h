// Float32.

#pragma once

#include "backend/format.h"

namespace kvedge::storage {

struct f32 : Plain<4> {
    static constexpr int32_t number = 2;
};

}  // namespace kvedge::storage
