#include "system/threads.h"

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#    include <sched.h>
#endif

namespace kvedge {

void parallel_for(int32_t n_threads, int32_t n_tasks, const std::function<void(int32_t, int32_t)> & task) {
    std::atomic<int32_t> next{ 0 };
    std::exception_ptr   failure;
    std::mutex           failure_lock;
    const auto           work = [&](int32_t worker) {
        try {
            for (int32_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n_tasks;) {
                task(i, worker);
            }
        } catch (...) {
            const std::lock_guard<std::mutex> guard(failure_lock);
            failure = std::current_exception();
            next.store(n_tasks);
        }
    };
    std::vector<std::thread> others;
    const int32_t            n = n_threads < n_tasks ? n_threads : n_tasks;
    try {
        others.reserve(n > 1 ? (size_t) n - 1 : 0);
        for (int32_t w = 1; w < n; w++) {
            others.emplace_back(work, w);
        }
    } catch (const std::exception &) {
    }
    work(0);
    for (auto & t : others) {
        t.join();
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
}

int32_t available_threads() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0) {
        return CPU_COUNT(&set);
    }
#endif
    const unsigned n = std::thread::hardware_concurrency();
    return n > 0 ? (int32_t) n : 1;
}

}  // namespace kvedge
