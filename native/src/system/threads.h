#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace kvedge {

// Calls task(i, worker) once for every i in [0, n_tasks), on up to n_threads threads (the caller is worker 0). If a thread cannot
// start, the other threads do its share. An exception in a task stops further tasks and is rethrown to the caller.
void parallel_for(int32_t n_threads, int32_t n_tasks, const std::function<void(int32_t i, int32_t worker)> & task);

// A pool of threads. During its lifetime, parallel_for on the thread that made it uses the pool instead of new threads.
class Crew {
  public:
    Crew();
    ~Crew();
    Crew(const Crew &)             = delete;
    Crew & operator=(const Crew &) = delete;

    // Calls work(0) on this thread, and work(i) once for each i < n on other threads. May skip some i > 0. work must not throw.
    void run(int32_t n, const std::function<void(int32_t)> & work);
    bool busy() const { return work_ != nullptr; }  // run() is active; a nested parallel_for must not use the pool

  private:
    void wait_for_work();

    std::vector<std::thread>             others_;
    std::mutex                           lock_;
    std::condition_variable              wake_, done_;
    const std::function<void(int32_t)> * work_ = nullptr;
    int32_t                              next_ = 0, end_ = 0, at_work_ = 0;  // next i, end of i, threads that run work_
    bool                                 over_ = false;
    Crew *                               before_;
};

// Returns the number of cores that this process may use, at least 1.
int32_t available_threads();

}  // namespace kvedge
