#include "store/pages.h"

#if defined(_WIN32)
#    define WIN32_LEAN_AND_MEAN
#    include <windows.h>
#else
#    include <sys/mman.h>
#    include <unistd.h>
#endif

namespace kvedge {

// Bytes from which on pages of 2 MiB are asked for where the system has them: fewer faults when a prompt is stored, fewer
// address look-ups when it is read. Rows fill such an area soon; a smaller one would hold more than its rows.
constexpr size_t HUGE_FROM = 4u << 20;

static size_t page_size() {
#if defined(_WIN32)
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
#else
    return (size_t) sysconf(_SC_PAGESIZE);
#endif
}

void * take_pages(size_t size) {
#if defined(_WIN32)
    return VirtualAlloc(nullptr, size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
#else
    void * data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        return nullptr;
    }
#    if defined(MADV_HUGEPAGE)
    if (size >= HUGE_FROM) {
        madvise(data, size, MADV_HUGEPAGE);
    }
#    endif
    return data;
#endif
}

void give_back(void * data, size_t size) {
#if defined(_WIN32)
    (void) size;
    VirtualFree(data, 0, MEM_RELEASE);
#else
    munmap(data, size);
#endif
}

Pages Pages::take(size_t size) {
    Pages        pages;
    const size_t page = page_size();
    if (size == 0 || size > SIZE_MAX - page) {
        return pages;
    }
    size = (size + page - 1) / page * page;
    if (void * data = take_pages(size)) {
        pages.data_ = (uint8_t *) data;
        pages.size_ = size;
    }
    return pages;
}

Pages::~Pages() {
    if (data_) {
        give_back(data_, size_);
    }
}

void discard(void * data, size_t size) {
#if defined(__linux__) || defined(__APPLE__)
    const size_t    page  = page_size();
    const uintptr_t first = ((uintptr_t) data + page - 1) / page * page;
    const uintptr_t last  = ((uintptr_t) data + size) / page * page;
    if (first < last) {
#    if defined(__linux__)
        madvise((void *) first, last - first, MADV_DONTNEED);
#    else
        madvise((void *) first, last - first, MADV_FREE);
#    endif
    }
#else
    (void) data;
    (void) size;
#endif
}

}  // namespace kvedge
