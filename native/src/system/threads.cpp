#include "system/threads.h"

#include <atomic>
#include <exception>
#include <functional>

#if defined(__linux__)
#    include <sched.h>
#endif

namespace kvedge {

static thread_local Crew * crew = nullptr;

Crew::Crew() : before_(crew) { crew = this; }

Crew::~Crew() {
    crew = before_;
    {
        const std::lock_guard<std::mutex> guard(lock_);
        over_ = true;
    }
    wake_.notify_all();
    for (auto & t : others_) {
        t.join();
    }
}

void Crew::wait_for_work() {
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
        wake_.wait(guard, [this] { return over_ || next_ < end_; });
        if (over_) {
            return;
        }
        const auto * work   = work_;
        const int32_t worker = next_++;
        at_work_++;
        guard.unlock();
        (*work)(worker);
        guard.lock();
        if (--at_work_ == 0) {
            done_.notify_one();
        }
    }
}

void Crew::run(int32_t n, const std::function<void(int32_t)> & work) {
    try {
        others_.reserve((size_t) n - 1);
        while (others_.size() + 1 < (size_t) n) {
            others_.emplace_back([this] { wait_for_work(); });
        }
    } catch (const std::exception &) {
    }
    {
        const std::lock_guard<std::mutex> guard(lock_);
        work_ = &work;
        next_ = 1;
        end_  = n;
    }
    wake_.notify_all();
    work(0);
    std::unique_lock<std::mutex> guard(lock_);
    end_ = 0;
    done_.wait(guard, [this] { return at_work_ == 0; });
    work_ = nullptr;
}

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
    const int32_t n = n_threads < n_tasks ? n_threads : n_tasks;
    if (n <= 1) {
        work(0);
    } else if (crew && !crew->busy()) {
        crew->run(n, std::cref(work));  // std::function allocates nothing for a reference
    } else {
        Crew own;
        own.run(n, std::cref(work));
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
