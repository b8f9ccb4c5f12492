// Memory taken from the operating system page by page, and given back to it the moment it is dropped.
// malloc may keep freed blocks; a KV buffer must not, or the savings stay in the process.

#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace kvedge {

class Pages {
  public:
    Pages() = default;
    Pages(Pages && other) noexcept { swap(other); }
    Pages & operator=(Pages && other) noexcept {
        Pages gone(std::move(other));
        swap(gone);
        return *this;
    }
    ~Pages();

    // size bytes, rounded up to whole pages, zero-filled on first touch. Empty (data() == nullptr) if refused or size == 0.
    static Pages take(size_t size);

    uint8_t *       data() { return data_; }
    const uint8_t * data() const { return data_; }
    size_t          size() const { return size_; }  // bytes, whole pages
    explicit        operator bool() const { return data_ != nullptr; }

  private:
    void swap(Pages & other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
    }

    uint8_t * data_ = nullptr;
    size_t    size_ = 0;
};

// Gives the whole pages within [data, data + size) back; what they held is lost, their addresses stay. For private memory
// that nobody reads before it is written again. On systems without such a call nothing happens.
void discard(void * data, size_t size);

}  // namespace kvedge
