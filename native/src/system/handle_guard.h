// A guard that lets one thread at a time use a handle. The thread may call the library again from inside its call.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace kvedge {

class HandleGuard {
  public:
    // Enters the handle. False: another thread holds it; nothing changed.
    bool enter() {
        const void * nobody = nullptr;
        if (holder_.load(std::memory_order_relaxed) != me() && !holder_.compare_exchange_strong(nobody, me(), std::memory_order_acquire)) {
            return false;
        }
        depth_++;
        return true;
    }

    // Enters the handle, and waits while another thread is in a call. False: that thread works beyond its call (hold_after_call).
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

    // Lets the calling thread, which is inside, hold the handle after leave() until end_hold().
    void hold_after_call() { working_ = true; }

    // Ends hold_after_call. Call from the thread that called hold_after_call, or from a thread that works for it while it waits.
    void end_hold() {
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
    int32_t                   depth_   = 0;  // nested calls; only the holder changes depth_ and working_
    std::atomic<bool>         working_{ false };
};

// Holds a handle during its lifetime. Converts to false if another thread holds the handle.
class HandleLock {
  public:
    explicit HandleLock(HandleGuard & guard, bool wait = false) : guard_((wait ? guard.wait() : guard.enter()) ? &guard : nullptr) {}
    ~HandleLock() {
        if (guard_) {
            guard_->leave();
        }
    }
    HandleLock(const HandleLock &)             = delete;
    HandleLock & operator=(const HandleLock &) = delete;

    explicit operator bool() const { return guard_ != nullptr; }

  private:
    HandleGuard * guard_;
};

}  // namespace kvedge
