// Checks by the operating system's figures that freed memory goes back to the system.

#include "system/pages.h"
#include "check.h"

#include <algorithm>

#if defined(_WIN32)
#    define WIN32_LEAN_AND_MEAN
#    include <windows.h>
#    include <psapi.h>
#elif defined(__APPLE__)
#    include <mach/mach.h>
#else
#    include <fstream>
#    include <unistd.h>
#endif

using namespace kvedge;

namespace {

constexpr size_t SIZE = 64u << 20, SLACK = 4u << 20;  // bytes; SLACK: allowed change by other allocations

struct Held {
    size_t resident, committed;  // bytes; committed: 0 on systems that charge only pages in use
};

Held held() {
#if defined(_WIN32)
    PROCESS_MEMORY_COUNTERS counters{};
    counters.cb = sizeof(counters);
    CHECK(K32GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof(counters)));
    return { counters.WorkingSetSize, counters.PagefileUsage };
#elif defined(__APPLE__)
    mach_task_basic_info   info{};
    mach_msg_type_number_t count = MACH_TASK_BASIC_INFO_COUNT;
    CHECK(task_info(mach_task_self(), MACH_TASK_BASIC_INFO, (task_info_t) &info, &count) == KERN_SUCCESS);
    return { info.resident_size, 0 };
#else
    size_t        pages = 0, resident = 0;
    std::ifstream file("/proc/self/statm");
    CHECK((bool) (file >> pages >> resident));
    return { resident * (size_t) sysconf(_SC_PAGESIZE), 0 };
#endif
}

bool about(size_t a, size_t b) { return (a > b ? a - b : b - a) <= SLACK; }

void test_pages() {
    const Held before = held();
    {
        Pages pages = Pages::take(SIZE);
        CHECK(pages && about(held().resident, before.resident));
        std::fill(pages.data(), pages.data() + SIZE, (uint8_t) 1);
        const Held full = held();
        CHECK(about(full.resident, before.resident + SIZE));
        CHECK(before.committed == 0 || about(full.committed, before.committed + SIZE));
#if !defined(__APPLE__)  // on macOS discarded pages stay until another program needs memory
        discard(pages.data(), SIZE);
        CHECK(about(held().resident, before.resident));
#endif
        // discarded pages can be written and read without a new allocation
        std::fill(pages.data(), pages.data() + SIZE, (uint8_t) 2);
        CHECK(std::count(pages.data(), pages.data() + SIZE, 2) == (std::ptrdiff_t) SIZE);
        CHECK(about(held().resident, before.resident + SIZE));
    }
    const Held after = held();
    CHECK(about(after.resident, before.resident) && about(after.committed, before.committed));
}

// Discards memory of malloc (by operator new), which ggml's buffers use: the pages go back to the system, the addresses stay valid.
void test_malloc() {
    const Held before = held();
    auto *     data   = new uint8_t[SIZE];
    std::fill(data, data + SIZE, (uint8_t) 1);
    CHECK(about(held().resident, before.resident + SIZE));
#if !defined(__APPLE__)
    discard(data, SIZE);
    CHECK(about(held().resident, before.resident));
#endif
    std::fill(data, data + SIZE, (uint8_t) 2);
    CHECK(std::count(data, data + SIZE, 2) == (std::ptrdiff_t) SIZE);
    delete[] data;
}

// Whether the system's figures are usable. The thread sanitizer takes several bytes of memory for each byte that is accessed.
#if defined(__SANITIZE_THREAD__)
constexpr bool COUNTS_HOLD = false;
#elif defined(__has_feature)
#    if __has_feature(thread_sanitizer)
constexpr bool COUNTS_HOLD = false;
#    else
constexpr bool COUNTS_HOLD = true;
#    endif
#else
constexpr bool COUNTS_HOLD = true;
#endif

}  // namespace

int main() {
    if (!COUNTS_HOLD) {
        std::fprintf(stderr, "not run under the thread sanitizer, whose own memory is counted with ours\n");
        return 0;
    }
    test_pages();
    test_malloc();
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
