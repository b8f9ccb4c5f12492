#pragma once

#include "kernels/kernels.h"

#include <string>

namespace kvedge {

// Checks every kernel of a table against plain loops, on generated rows. Returns a text about the first wrong kernel; empty: all are right.
// May throw std::bad_alloc.
std::string what_is_wrong(const Kernels & kn);

}  // namespace kvedge
