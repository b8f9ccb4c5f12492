// Makes allocations fail on purpose: operator new, and the pages of system/pages.h. Include it in one file of a program only, because
// it replaces the program's allocators.

#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // a false alarm for the allocators below when they are inlined
#endif

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#    include <cerrno>
#    include <sys/mman.h>
#    include <sys/syscall.h>
#    include <unistd.h>
#endif

namespace faults {

inline std::atomic<int64_t> left{ -1 };     // allocations until one fails; below 0: no allocation fails
inline std::atomic<bool>    lasting{ false };  // whether all allocations after the one that fails fail, too
inline std::atomic<bool>    fired{ false };
inline std::atomic<int64_t> live{ 0 };      // allocated blocks and mappings that were not freed

// Returns whether the allocations of a caller are counted. caller: an address in the caller's code. NULL: all are counted.
inline bool (*counted)(const void * caller) = nullptr;

inline bool fails(const void * caller) {
    if (left.load(std::memory_order_relaxed) <= 0 || (counted && !counted(caller)) || left.fetch_sub(1) != 1) {
        return false;
    }
    left  = lasting ? 1 : 0;
    fired = true;
    return true;
}

// Makes the n-th allocation from now on fail; on: also all after it.
inline void arm(int64_t n, bool on = false) {
    fired   = false;
    lasting = on;
    left    = n;
}

// Makes no more allocation fail. Returns whether an allocation failed since arm().
inline bool disarm() {
    left = -1;
    return fired;
}

inline void * take(size_t size, const void * caller) noexcept {
    void * data = fails(caller) ? nullptr : std::malloc(size ? size : 1);
    live += data ? 1 : 0;
    return data;
}

inline void give(void * data) noexcept {
    live -= data ? 1 : 0;
    std::free(data);
}

}  // namespace faults

// noinline: the compiler may remove a pair of new and delete that it sees, and KVEDGE_CALLER must be the address of the caller.
#define KVEDGE_CALLER __builtin_return_address(0)

__attribute__((noinline)) void * operator new(size_t size) {
    if (void * data = faults::take(size, KVEDGE_CALLER)) {
        return data;
    }
    throw std::bad_alloc();
}
__attribute__((noinline)) void * operator new[](size_t size) {
    if (void * data = faults::take(size, KVEDGE_CALLER)) {
        return data;
    }
    throw std::bad_alloc();
}
__attribute__((noinline)) void * operator new(size_t size, const std::nothrow_t &) noexcept { return faults::take(size, KVEDGE_CALLER); }
__attribute__((noinline)) void * operator new[](size_t size, const std::nothrow_t &) noexcept { return faults::take(size, KVEDGE_CALLER); }
void operator delete(void * data) noexcept { faults::give(data); }
void operator delete[](void * data) noexcept { faults::give(data); }
void operator delete(void * data, size_t) noexcept { faults::give(data); }
void operator delete[](void * data, size_t) noexcept { faults::give(data); }
void operator delete(void * data, const std::nothrow_t &) noexcept { faults::give(data); }
void operator delete[](void * data, const std::nothrow_t &) noexcept { faults::give(data); }

#if defined(__linux__) && !defined(__SANITIZE_THREAD__)
// Replaces mmap for calls of the program itself; the C library maps memory without this function.
extern "C" __attribute__((noinline)) void * mmap(void * at, size_t size, int protection, int flags, int file, off_t offset) noexcept {
    if (faults::fails(KVEDGE_CALLER)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    void * data = (void *) syscall(SYS_mmap, at, size, protection, flags, file, offset);
    faults::live += data != MAP_FAILED ? 1 : 0;
    return data;
}
extern "C" int munmap(void * data, size_t size) noexcept {
    faults::live--;
    return (int) syscall(SYS_munmap, data, size);
}
#endif
