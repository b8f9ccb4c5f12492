// Writes memory to a file in a background thread.

#pragma once

#include "system/pages.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace kvedge {

// Pages in memory (from), and the same bytes as a mapped file (to), once they are written.
struct Spilled {
    std::shared_ptr<const Pages> from;
    std::shared_ptr<Pages>       to;
};

struct SpillJob {
    enum class State : uint8_t { waiting, written, failed, dropped };  // dropped: the Spill ended before it wrote the job

    std::vector<Spilled> parts;            // `to` may be read in state `written`
    std::string          problem;          // the reason in state `failed`; may be read only then
    std::atomic<State>   state{ State::waiting };
    std::atomic<bool>    unwanted{ false };  // set by the caller: the job need not be written any more

    uint64_t bytes() const;
};

class Spill {
  public:
    explicit Spill(std::string folder);
    ~Spill();  // drops the jobs that are not written yet

    const std::string & folder() const { return folder_; }
    // Returns whether this process made the object. In a forked child it must not be used or destroyed: the child has no such thread,
    // and the lock may stay locked for ever.
    bool usable() const;

    // Queues a job. The memory of its parts must not change afterwards. Throws std::bad_alloc, std::system_error (no thread).
    void write(std::shared_ptr<SpillJob> job);

  private:
    void run() noexcept;
    bool write_parts(SpillJob & job) const;

    const std::string                     folder_;
    const int                             process_;
    std::mutex                            lock_;
    std::condition_variable               more_;
    std::deque<std::shared_ptr<SpillJob>> jobs_;
    std::atomic<bool>                     over_{ false };
    std::thread                           thread_;
};

struct EndSpill {
    void operator()(Spill * spill) const noexcept;  // deletes a usable Spill, and leaks it in a forked child
};

}  // namespace kvedge
