// What the ways of taking rows out of a sequence share.

#pragma once

#include "store/sequence.h"

#include <algorithm>

namespace kvedge {

// Keeps the tokens and scores whose flag is set.
void keep_listed(RaggedHead & head, const std::vector<uint8_t> & keep);

// Of a row [capacity]: the n entries from `first` on become those in keep, and the rest moves up.
template <class T> void close_row(T * row, size_t capacity, size_t first, size_t n, const std::vector<int32_t> & keep) {
    size_t to = first;
    for (int32_t r : keep) {
        if (first + (size_t) r < capacity) {  // tokens whose attention nobody sums may follow
            row[to++] = row[first + (size_t) r];
        }
    }
    for (size_t from = first + n; from < capacity; from++) {
        row[to++] = row[from];
    }
    std::fill(row + std::min(to, capacity), row + capacity, T());
}

}  // namespace kvedge
