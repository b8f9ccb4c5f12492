#include "system/pages.h"

#include <cstring>

#if defined(_WIN32)
#    define WIN32_LEAN_AND_MEAN
#    include <windows.h>
#else
#    include <sys/mman.h>
#    include <unistd.h>
#endif

namespace kvedge {

#if defined(_WIN32)

static size_t page_size() {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

void * take_pages(size_t size) { return VirtualAlloc(nullptr, size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE); }

void give_back(void * data, size_t) { VirtualFree(data, 0, MEM_RELEASE); }

static void unmap(void * data, size_t) { UnmapViewOfFile(data); }

static void cool_pages(void * data, size_t size) { VirtualUnlock(data, size); }  // removes unlocked pages from the working set

// Looks up DiscardVirtualMemory at run time, because a program that links it does not start before Windows 8.1.
static bool discard_at_once(void * data, size_t size) {
    using Discard                = DWORD(WINAPI *)(PVOID, SIZE_T);
    static const Discard function = (Discard) (void *) GetProcAddress(GetModuleHandleW(L"kernel32.dll"), "DiscardVirtualMemory");
    return function && function(data, size) == ERROR_SUCCESS;
}

// Does not decommit the pages, although that would lower the commit charge: the owner of the buffer would have to commit them again
// before a write.
static void discard_pages(void * data, size_t size) {
    if (!discard_at_once(data, size) && VirtualAlloc(data, size, MEM_RESET, PAGE_READWRITE)) {
        VirtualUnlock(data, size);  // removes unlocked pages from the working set
    }
}

#else

// Areas of at least this size ask for pages of 2 MiB. These need fewer page faults and address look-ups. Rows soon fill a large
// area; in a small one, large pages would waste memory.
constexpr size_t HUGE_FROM = 4u << 20;

static size_t page_size() { return (size_t) sysconf(_SC_PAGESIZE); }

void * take_pages(size_t size) {
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
}

void give_back(void * data, size_t size) { munmap(data, size); }

static void unmap(void * data, size_t size) { munmap(data, size); }

static void cool_pages(void * data, size_t size) { madvise(data, size, MADV_DONTNEED); }

static void discard_pages(void * data, size_t size) {
#    if defined(__linux__)
    madvise(data, size, MADV_DONTNEED);
#    else
    madvise(data, size, MADV_FREE);
#    endif
}

#endif

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

Pages::Pages(const Pages & other) {
    if (!other) {
        return;
    }
    Pages copy = take(other.size_);
    if (!copy) {
        throw std::bad_alloc();
    }
    memcpy(copy.data_, other.data_, other.size_);
    swap(copy);
}

Pages Pages::of_file(void * data, size_t size) {
    Pages pages;
    pages.data_   = (uint8_t *) data;
    pages.size_   = size;
    pages.mapped_ = true;
    return pages;
}

void Pages::cool() const {
    if (mapped_) {
        cool_pages(data_, size_);
    }
}

Pages::~Pages() {
    if (data_) {
        (mapped_ ? unmap : give_back)(data_, size_);
    }
}

SharedPages SharedPages::take(size_t size) {
    Pages taken = Pages::take(size);
    return taken ? SharedPages(std::make_shared<Pages>(std::move(taken))) : SharedPages();
}

void SharedPages::own() {
    if (!can_write()) {
        *this = SharedPages(*this);
    }
}

void discard(void * data, size_t size) {
    const size_t    page  = page_size();
    const uintptr_t first = ((uintptr_t) data + page - 1) / page * page;
    const uintptr_t last  = ((uintptr_t) data + size) / page * page;
    if (first < last) {
        discard_pages((void *) first, last - first);
    }
}

}  // namespace kvedge
