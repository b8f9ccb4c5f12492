// Files that appear whole or not at all, and files that are read with every size in doubt.

#pragma once

#include "kvedge.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <system_error>
#include <type_traits>
#include <vector>

namespace kvedge {

// Where a payload is written to: a file, or nowhere, to learn its size.
class Sink {
  public:
    virtual ~Sink() = default;
    virtual void write(const void * data, size_t size) { size_ += size, (void) data; }

    template <class T> void value(T x) {
        static_assert(std::is_arithmetic_v<T>, "numbers only");
        write(&x, sizeof(x));
    }
    template <class T> void values(const std::vector<T> & x) {
        if (!x.empty()) {
            write(x.data(), x.size() * sizeof(T));
        }
    }
    uint64_t size() const { return size_; }

  protected:
    uint64_t size_ = 0;
};

// Writes beside `path` and takes its place in commit(); what was there before stays until then.
class FileWriter : public Sink {
  public:
    ~FileWriter() override;
    kvedge_status open(const char * path, kvedge_error * err);
    void          write(const void * data, size_t size) override;  // a failure shows in commit()
    uint32_t      take_checksum();                                 // of what was written since the last call
    kvedge_status commit(kvedge_error * err);

  private:
    std::FILE *     file_ = nullptr;
    std::string     path_, part_;  // UTF-8
    uint32_t        checksum_ = 0;
    std::error_code failed_;  // of the first failed write
};

// Reads a file from its beginning; nothing beyond the end is ever granted.
class FileReader {
  public:
    ~FileReader();
    kvedge_status open(const char * path, kvedge_error * err);
    bool          read(void * data, size_t size);  // false: beyond the limit, or the disk failed
    uint64_t      left() const { return limit_ - at_; }
    uint64_t      size() const { return size_; }
    void          limit_to(uint64_t bytes) { limit_ = at_ + bytes; }  // bytes <= left()
    void          unlimit() { limit_ = size_; }
    uint32_t      take_checksum();

    template <class T> bool value(T & x) {
        static_assert(std::is_arithmetic_v<T>, "numbers only");
        return read(&x, sizeof(x));
    }
    // n numbers, after a look at whether the file can hold them
    template <class T> bool values(std::vector<T> & x, uint64_t n) {
        if (n > left() / sizeof(T)) {
            return false;
        }
        x.resize((size_t) n);
        return n == 0 || read(x.data(), (size_t) n * sizeof(T));
    }

  private:
    std::FILE * file_ = nullptr;
    uint64_t    size_ = 0, at_ = 0, limit_ = 0;
    uint32_t    checksum_ = 0;
};

}  // namespace kvedge
