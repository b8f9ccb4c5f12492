// Memory that comes directly from the operating system, in pages, and returns to it as soon as it is freed. malloc may keep
// freed blocks; then a compressed KV cache would not make the process smaller.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace kvedge {

// take_pages returns private memory of size >= 1 bytes, zero-filled at first access; NULL: no memory. give_back frees it; size:
// the size that was taken, or any larger size up to the end of the last page.
void * take_pages(size_t size);
void   give_back(void * data, size_t size);

class Pages {
  public:
    Pages() = default;
    Pages(const Pages & other);  // deep copy. Throws std::bad_alloc
    Pages(Pages && other) noexcept { swap(other); }
    Pages & operator=(Pages other) noexcept {
        swap(other);
        return *this;
    }
    ~Pages();

    // Takes `size` bytes, rounded up to pages, zero-filled at first access. Empty (data() == nullptr) without memory or for size 0.
    static Pages take(size_t size);
    // Wraps read-only memory of a mapped file (UnnamedFile::map).
    static Pages of_file(void * data, size_t size);
    // Drops the resident pages of a mapped file. The system reads them again at their next access.
    void cool() const;

    uint8_t *       data() { return data_; }
    const uint8_t * data() const { return data_; }
    size_t          size() const { return size_; }  // bytes, a multiple of the page size unless mapped
    bool            mapped() const { return mapped_; }
    explicit        operator bool() const { return data_ != nullptr; }

  private:
    void swap(Pages & other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(mapped_, other.mapped_);
    }

    uint8_t * data_   = nullptr;
    size_t    size_   = 0;
    bool      mapped_ = false;  // the memory of a mapped file
};

// Pages that several owners can share. Copies are deep; share() makes a shallow copy. Do not write unless can_write() is true.
class SharedPages {
  public:
    SharedPages() = default;
    explicit SharedPages(std::shared_ptr<Pages> pages) : pages_(std::move(pages)) {}
    SharedPages(const SharedPages & other) : pages_(other.pages_ ? std::make_shared<Pages>(*other.pages_) : nullptr) {}
    SharedPages(SharedPages &&) = default;
    SharedPages & operator=(SharedPages other) noexcept {
        pages_.swap(other.pages_);
        return *this;
    }

    static SharedPages           take(size_t size);  // empty if there are no pages; throws std::bad_alloc for its bookkeeping
    SharedPages                  share() const { return SharedPages(pages_); }
    std::shared_ptr<const Pages> pages() const { return pages_; }  // NULL: empty
    // can_write: whether this is the only owner and the pages are no mapped file. own: copies the pages if not; throws std::bad_alloc.
    bool                         can_write() const { return !pages_ || (pages_.use_count() == 1 && !pages_->mapped()); }
    void                         own();

    uint8_t * data() const { return pages_ ? pages_->data() : nullptr; }
    size_t    size() const { return pages_ ? pages_->size() : 0; }

  private:
    std::shared_ptr<Pages> pages_;
};

// An allocator for vectors that grow with the prompt: from FROM bytes on, a vector has its own pages.
template <class T> struct PageAllocator {
    using value_type = T;

    // AddressSanitizer detects writes beyond the end only in blocks of malloc.
#if defined(__SANITIZE_ADDRESS__)
    static constexpr size_t FROM = SIZE_MAX;
#else
    static constexpr size_t FROM = 128u << 10;  // bytes
#endif

    PageAllocator() = default;
    template <class U> PageAllocator(const PageAllocator<U> &) {}

    T * allocate(size_t n) {
        if (n > SIZE_MAX / sizeof(T)) {
            throw std::bad_alloc();
        }
        if (n * sizeof(T) < FROM) {
            return (T *) ::operator new(n * sizeof(T));
        }
        if (void * data = take_pages(n * sizeof(T))) {
            return (T *) data;
        }
        throw std::bad_alloc();
    }
    void deallocate(T * data, size_t n) {
        if (n * sizeof(T) < FROM) {
            ::operator delete(data);
        } else {
            give_back(data, n * sizeof(T));
        }
    }
    template <class U> bool operator==(const PageAllocator<U> &) const { return true; }
    template <class U> bool operator!=(const PageAllocator<U> &) const { return false; }
};

template <class T> using Bulk = std::vector<T, PageAllocator<T>>;

// Frees the memory of all complete pages in [data, data + size). The addresses stay valid, the contents are lost. For private
// memory that is not read before it is written again. On Windows the pages still count against the commit limit, because their
// owner may write to them at any time.
void discard(void * data, size_t size);

}  // namespace kvedge
