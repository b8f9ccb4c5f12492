// Storage type kivi2: KIVI with 2 bits per number (kivi4.h).

#pragma once

#include "rows/storage/kivi4.h"

namespace kvedge::storage {

struct kivi2 : Kivi<2> {
    static constexpr int32_t number = 6;
};

}  // namespace kvedge::storage
