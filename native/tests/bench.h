// Shared code of the attention benchmarks: timing of tasks on several threads, and random rows.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <functional>
#include <thread>
#include <vector>

namespace kvedge {

struct Seconds {
    double wall, processor;  // processor: CPU time divided by the number of threads
};

// Runs n_tasks tasks on n_threads threads and returns the time. Threads take tasks from one counter.
inline Seconds timed(int32_t n_threads, int32_t n_tasks, const std::function<void(int32_t)> & task) {
    std::atomic<int32_t>     next{ 0 };
    const auto               start = std::chrono::steady_clock::now();
    const std::clock_t       clock = std::clock();
    std::vector<std::thread> others;
    const auto               work = [&] {
        for (int32_t i; (i = next.fetch_add(1)) < n_tasks;) {
            task(i);
        }
    };
    for (int32_t w = 1; w < n_threads; w++) {
        others.emplace_back(work);
    }
    work();
    for (auto & t : others) {
        t.join();
    }
    return { std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
             (double) (std::clock() - clock) / CLOCKS_PER_SEC / n_threads };
}

// Writes n half-precision numbers of random sign and a random magnitude from 1/8 to 1/2.
inline void fill_halves(uint16_t * x, size_t n, uint32_t & random) {
    for (size_t i = 0; i < n; i++) {
        random = random * 1664525u + 1013904223u;
        x[i]   = (uint16_t) (0x3000 | (random >> 16 & 0x8bff));
    }
}

}  // namespace kvedge
