#pragma once

#include "kernels/kernels.h"

#include <string>

namespace kvedge {

// Runs every kernel of a table on made-up rows, compares with plain loops, and names the first that is wrong; empty if none
// is. May throw std::bad_alloc.
std::string what_is_wrong(const Kernels & kn);

}  // namespace kvedge
