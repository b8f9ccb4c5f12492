// KIVI in 2 bits.

#pragma once

#include "rows/storage/kivi4.h"

namespace kvedge::storage {

struct kivi2 : Kivi<2> {
    static constexpr int32_t number = 6;
};

}  // namespace kvedge::storage
