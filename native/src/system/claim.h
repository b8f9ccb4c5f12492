// Who is using a handle: one thread at a time, which may come in again from inside its own call.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace kvedge {

class Owner {
  public:
    // False: another thread is inside, and nothing has changed.
    bool enter() {
        const void * nobody = nullptr;
        if (holder_.load(std::memory_order_relaxed) != me() && !holder_.compare_exchange_strong(nobody, me(), std::memory_order_acquire)) {
            return false;
        }
        depth_++;
        return true;
    }

    // The same, but waits for a call of another thread. False: that one went on to work beyond its call.
    bool wait() {
        while (!enter()) {
            if (working_.load(std::memory_order_relaxed)) {
                return false;
            }
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
        return true;
    }

    void leave() {
        depth_--;
        give_up();
    }

    // The thread, which is inside, goes on to work on the handle when it has left: until `rest`.
    void go_on() { working_ = true; }

    // Called by the thread that went on, or by one that works for it while it waits.
    void rest() {
        if (working_) {
            working_ = false;
            give_up();
        }
    }

  private:
    static const void * me() {
        static thread_local char tag;
        return &tag;
    }

    void give_up() {
        if (depth_ == 0 && !working_) {
            holder_.store(nullptr, std::memory_order_release);
        }
    }

    std::atomic<const void *> holder_{ nullptr };
    int32_t                   depth_   = 0;  // this and the next belong to the holder
    std::atomic<bool>         working_{ false };
};

// Inside for as long as it lives; false where another thread is.
class Claim {
  public:
    explicit Claim(Owner & owner, bool wait = false) : owner_((wait ? owner.wait() : owner.enter()) ? &owner : nullptr) {}
    ~Claim() {
        if (owner_) {
            owner_->leave();
        }
    }
    Claim(const Claim &)             = delete;
    Claim & operator=(const Claim &) = delete;

    explicit operator bool() const { return owner_ != nullptr; }

  private:
    Owner * owner_;
};

}  // namespace kvedge
