// IEEE half precision.

#pragma once

#include "backend/format.h"

namespace kvedge::storage {

struct f16 : Plain<2> {
    static constexpr int32_t number = 0;
};

}  // namespace kvedge::storage
