#pragma once

#include <cstdint>
#include <functional>

namespace kvedge {

// Calls task(i, worker) once for every i in [0, n_tasks), on up to n_threads threads (the caller is worker 0).
// If a thread cannot be started, the others do its share. An exception of a task stops the rest and is rethrown here.
void parallel_for(int32_t n_threads, int32_t n_tasks, const std::function<void(int32_t i, int32_t worker)> & task);

// Cores that this process may run on, at least 1.
int32_t available_threads();

}  // namespace kvedge
