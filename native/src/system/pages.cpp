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

static void cool_pages(void * data, size_t size) { VirtualUnlock(data, size); }  // they leave the working set

// Windows 8.1 and newer have DiscardVirtualMemory; a program that named it would not start where it is missing.
static bool discard_at_once(void * data, size_t size) {
    using Discard                = DWORD(WINAPI *)(PVOID, SIZE_T);
    static const Discard function = (Discard) (void *) GetProcAddress(GetModuleHandleW(L"kernel32.dll"), "DiscardVirtualMemory");
    return function && function(data, size) == ERROR_SUCCESS;
}

// Decommitting would give the commit charge back as well, but the owner of the buffer does not know that it had to commit
// the pages again before it writes to them.
static void discard_pages(void * data, size_t size) {
    if (!discard_at_once(data, size) && VirtualAlloc(data, size, MEM_RESET, PAGE_READWRITE)) {
        VirtualUnlock(data, size);  // of pages that are not locked: they leave the working set
    }
}

#else

// Bytes from which on pages of 2 MiB are asked for where the system has them: fewer faults when a prompt is stored, fewer
// address look-ups when it is read. Rows fill such an area soon; a smaller one would hold more than its rows.
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
