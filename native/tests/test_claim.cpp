// Tests Owner and Claim, which decide who may use a handle: several threads, nested calls, and work that continues after a call.

#include "check.h"
#include "system/claim.h"

#include <atomic>
#include <thread>
#include <vector>

using namespace kvedge;

namespace {

bool another_enters(Owner & owner) {
    bool        entered = false;
    std::thread other([&] {
        const Claim claim(owner);
        entered = (bool) claim;
    });
    other.join();
    return entered;
}

void test_one_thread_at_a_time() {
    Owner owner;
    {
        const Claim claim(owner);
        CHECK(claim);
        const Claim again(owner);  // a nested call
        CHECK(again);
        CHECK(!another_enters(owner));
    }
    CHECK(another_enters(owner));
}

void test_work_that_goes_on() {
    Owner owner;
    {
        const Claim claim(owner);
        owner.go_on();
    }
    CHECK(!another_enters(owner));
    {
        const Claim claim(owner);  // a call from the continued work
        CHECK(claim);
    }
    CHECK(!another_enters(owner));
    std::thread worker([&] { owner.rest(); });
    worker.join();
    CHECK(another_enters(owner));
    owner.rest();  // no work continues: no effect
    bool        waited = false;
    std::thread other;
    {
        const Claim claim(owner);
        other = std::thread([&] { waited = (bool) Claim(owner, true); });
    }
    other.join();
    CHECK(waited);
    {
        const Claim claim(owner);
        owner.go_on();
    }
    other = std::thread([&] { waited = (bool) Claim(owner, true); });
    other.join();
    CHECK(!waited);  // fails instead of waiting for work that continues
    owner.rest();
    CHECK(another_enters(owner));
}

// Many threads change plain memory under claims, so that the thread sanitizer reports a missing lock.
void test_many_threads() {
    Owner                    owner;
    int64_t                  guarded = 0;
    std::atomic<int64_t>     entered{ 0 }, refused{ 0 };
    std::vector<std::thread> threads;
    for (int32_t t = 0; t < 4; t++) {
        threads.emplace_back([&, t] {
            for (int32_t i = 0; i < 20000; i++) {
                const Claim claim(owner);
                if (!claim) {
                    refused++;
                    continue;
                }
                guarded++;
                entered++;
                if ((i + t) % 7 == 0) {
                    owner.go_on();
                    std::thread worker;
                    if (i % 700 == 0) {  // another thread does the work while this one waits, as ggml's threads do
                        worker = std::thread([&] { guarded++; owner.rest(); });
                        worker.join();
                        entered++;
                    } else {
                        owner.rest();
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
