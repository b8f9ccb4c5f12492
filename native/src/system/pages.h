// Memory taken from the operating system page by page, and given back to it the moment it is dropped.
// malloc may keep freed blocks; a KV buffer must not, or the savings stay in the process.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace kvedge {

// Private memory of size >= 1 bytes, zero-filled on first touch; NULL if refused. give_back: the same size, or more up to the
// end of its last page.
void * take_pages(size_t size);
void   give_back(void * data, size_t size);

class Pages {
  public:
    Pages() = default;
    Pages(const Pages & other);  // a copy has memory of its own. Throws std::bad_alloc
    Pages(Pages && other) noexcept { swap(other); }
    Pages & operator=(Pages other) noexcept {
        swap(other);
        return *this;
    }
    ~Pages();

    // size bytes, rounded up to whole pages, zero-filled on first touch. Empty (data() == nullptr) if refused or size == 0.
    static Pages take(size_t size);
    // Memory that UnnamedFile::map made: it can be read only.
    static Pages of_file(void * data, size_t size);
    // The pages of a file leave this process; they are read again where they are touched.
    void cool() const;

    uint8_t *       data() { return data_; }
    const uint8_t * data() const { return data_; }
    size_t          size() const { return size_; }  // bytes, whole pages
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
    bool      mapped_ = false;  // of a file
};

// Pages that others may have, too. A copy has pages of its own, unless it is made by share(). What can_write() denies is not written.
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

    static SharedPages           take(size_t size);  // as Pages::take. Throws std::bad_alloc for its own few bytes
    SharedPages                  share() const { return SharedPages(pages_); }
    std::shared_ptr<const Pages> pages() const { return pages_; }  // NULL: there are none
    // Whether nobody else has the pages, and they lie in no file. own() makes it so. Throws std::bad_alloc.
    bool                         can_write() const { return !pages_ || (pages_.use_count() == 1 && !pages_->mapped()); }
    void                         own();

    uint8_t * data() const { return pages_ ? pages_->data() : nullptr; }
    size_t    size() const { return pages_ ? pages_->size() : 0; }

  private:
    std::shared_ptr<Pages> pages_;
};

// For vectors that are large with a long prompt: from a size on they are pages of their own.
template <class T> struct PageAllocator {
    using value_type = T;

    // A sanitizer sees what is written beyond the end of malloc's blocks only.
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

// Gives the whole pages within [data, data + size) back; what they held is lost, their addresses stay. For private memory
// that nobody reads before it is written again. Windows takes the memory and keeps its charge: the commit limit counts the
// pages on, as their owner may write to them at any time.
void discard(void * data, size_t size);

}  // namespace kvedge
