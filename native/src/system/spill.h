// Memory that is written to a file by a thread of its own, while the program goes on.

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

// Memory, and the same bytes in the file once they are written.
struct Spilled {
    std::shared_ptr<const Pages> from;
    std::shared_ptr<Pages>       to;
};

struct SpillJob {
    enum class State : uint8_t { waiting, written, failed, dropped };  // dropped: its Spill ended before

    std::vector<Spilled> parts;            // `to` may be read when it is written
    std::string          problem;          // and this when it failed
    std::atomic<State>   state{ State::waiting };
    std::atomic<bool>    unwanted{ false };  // nobody waits for it any more

    uint64_t bytes() const;
};

class Spill {
  public:
    explicit Spill(std::string folder);
    ~Spill();  // what is not written yet will not be

    const std::string & folder() const { return folder_; }
    // False in a process that was forked from the one that made this: it has no such thread, and lock and condition may be that one's for
    // good. Nothing can be done with it there, not even end it.
    bool usable() const;

    // Nothing is to be written to the memory of a job any more. Throws std::bad_alloc, std::system_error (no thread).
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
    void operator()(Spill * spill) const noexcept;  // where it can be ended
};

}  // namespace kvedge
