// Tests HandleGuard and HandleLock, which decide who may use a handle: several threads, nested calls, and work that continues after a call.

#include "check.h"
#include "system/handle_guard.h"

#include <atomic>
#include <thread>
#include <vector>

using namespace kvedge;

namespace {

bool another_enters(HandleGuard & guard) {
    bool        entered = false;
    std::thread other([&] {
        const HandleLock lock(guard);
        entered = (bool) lock;
    });
    other.join();
    return entered;
}

void test_one_thread_at_a_time() {
    HandleGuard guard;
    {
        const HandleLock lock(guard);
        CHECK(lock);
        const HandleLock again(guard);  // a nested call
        CHECK(again);
        CHECK(!another_enters(guard));
    }
    CHECK(another_enters(guard));
}

void test_work_that_goes_on() {
    HandleGuard guard;
    {
        const HandleLock lock(guard);
        guard.hold_after_call();
    }
    CHECK(!another_enters(guard));
    {
        const HandleLock lock(guard);  // a call from the continued work
        CHECK(lock);
    }
    CHECK(!another_enters(guard));
    std::thread worker([&] { guard.end_hold(); });
    worker.join();
    CHECK(another_enters(guard));
    guard.end_hold();  // no work continues: no effect
    bool        waited = false;
    std::thread other;
    {
        const HandleLock lock(guard);
        other = std::thread([&] { waited = (bool) HandleLock(guard, true); });
    }
    other.join();
    CHECK(waited);
    {
        const HandleLock lock(guard);
        guard.hold_after_call();
    }
    other = std::thread([&] { waited = (bool) HandleLock(guard, true); });
    other.join();
    CHECK(!waited);  // fails instead of waiting for work that continues
    guard.end_hold();
    CHECK(another_enters(guard));
}

// Many threads change plain memory under locks, so that the thread sanitizer reports a missing lock.
void test_many_threads() {
    HandleGuard              guard;
    int64_t                  guarded = 0;
    std::atomic<int64_t>     entered{ 0 }, refused{ 0 };
    std::vector<std::thread> threads;
    for (int32_t t = 0; t < 4; t++) {
        threads.emplace_back([&, t] {
            for (int32_t i = 0; i < 20000; i++) {
                const HandleLock lock(guard);
                if (!lock) {
                    refused++;
                    continue;
                }
                guarded++;
                entered++;
                if ((i + t) % 7 == 0) {
                    guard.hold_after_call();
                    std::thread worker;
                    if (i % 700 == 0) {  // another thread does the work while this one waits, as ggml's threads do
                        worker = std::thread([&] { guarded++; guard.end_hold(); });
                        worker.join();
                        entered++;
                    } else {
                        guard.end_hold();
                    }
                }
            }
        });
    }
    for (auto & thread : threads) {
        thread.join();
    }
    CHECK(guarded == entered && entered > 0);
    std::fprintf(stderr, "%lld entered, %lld refused\n", (long long) entered, (long long) refused);
}

}  // namespace

int main() {
    test_one_thread_at_a_time();
    test_work_that_goes_on();
    test_many_threads();
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
