#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace kvedge {

// Calls task(i, worker) once for every i in [0, n_tasks), on up to n_threads threads (the caller is worker 0).
// If a thread cannot be started, the others do its share. An exception of a task stops the rest and is rethrown here.
void parallel_for(int32_t n_threads, int32_t n_tasks, const std::function<void(int32_t i, int32_t worker)> & task);

// While it is there, parallel_for on its thread starts no threads anew: those that it started wait for more.
class Crew {
  public:
    Crew();
    ~Crew();
    Crew(const Crew &)             = delete;
    Crew & operator=(const Crew &) = delete;

    // Calls work(0) here and work(i) once on each of up to n - 1 others. work throws nothing.
    void run(int32_t n, const std::function<void(int32_t)> & work);
    bool busy() const { return work_ != nullptr; }  // run calls itself

  private:
    void wait_for_work();

    std::vector<std::thread>             others_;
    std::mutex                           lock_;
    std::condition_variable              wake_, done_;
    const std::function<void(int32_t)> * work_ = nullptr;
    int32_t                              next_ = 0, end_ = 0, at_work_ = 0;  // who comes next, and where that ends
    bool                                 over_ = false;
    Crew *                               before_;
};

// Cores that this process may run on, at least 1.
int32_t available_threads();

}  // namespace kvedge
