// Writers and readers of bytes. A written file appears complete or not at all. A reader checks every size before it allocates.

#pragma once

#include "kvedge.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>
#include <type_traits>
#include <vector>

namespace kvedge {

int process_id();

// A destination of bytes: a file, memory, or nothing (this class itself, which only counts the bytes).
class Sink {
  public:
    virtual ~Sink() = default;
    virtual void write(const void * data, size_t size) { size_ += size, (void) data; }

    template <class T> void value(T x) {
        static_assert(std::is_arithmetic_v<T>, "numbers only");
        write(&x, sizeof(x));
    }
    template <class T, class A> void values(const std::vector<T, A> & x) {
        if (!x.empty()) {
            write(x.data(), x.size() * sizeof(T));
        }
    }
    uint64_t size() const { return size_; }

  protected:
    uint64_t size_ = 0;
};

class SummedSink : public Sink {
  public:
    void     write(const void * data, size_t size) final;
    uint32_t take_checksum();  // checksum of the bytes written since the last call

  protected:
    virtual void put(const void * data, size_t size) = 0;

  private:
    uint32_t checksum_ = 0;
};

// Writes a temporary file beside `path`. commit() replaces `path` by it, and reports the first failed write.
class FileWriter final : public SummedSink {
  public:
    ~FileWriter() override;
    kvedge_status open(const char * path, kvedge_error * err);
    kvedge_status commit(kvedge_error * err);

  private:
    void flush();
    void put(const void * data, size_t size) override;
    void send(const uint8_t * data, size_t size);
    bool is_open() const { return file_ >= 0; }

    int                   file_ = -1;
    std::vector<uint8_t>  buffer_;  // bytes that are not in the file yet
    std::filesystem::path path_, part_;  // part_: the temporary file; empty if none exists
    std::error_code       failed_;  // error of the first failed write
};

// Writes to the caller's memory of `size` bytes. Counts further bytes, but does not write them.
class BytesWriter final : public SummedSink {
  public:
    BytesWriter(void * data, size_t size) : at_((char *) data), left_(size) {}

  private:
    void put(const void * data, size_t size) override;

    char * at_;
    size_t left_;
};

// A source of bytes, read from its beginning to a limit (by default its end).
class Reader {
  public:
    virtual ~Reader() = default;
    bool     read(void * data, size_t size);  // false: fewer bytes before the limit, or the disk failed
    uint64_t left() const { return limit_ - at_; }
    uint64_t size() const { return size_; }
    void     limit_to(uint64_t bytes) { limit_ = at_ + bytes; }  // bytes <= left()
    void     unlimit() { limit_ = size_; }
    bool     skip();  // reads the bytes up to the limit, for the checksum only
    uint32_t take_checksum();

    template <class T> bool value(T & x) {
        static_assert(std::is_arithmetic_v<T>, "numbers only");
        return read(&x, sizeof(x));
    }
    // Reads n numbers. Checks first that the source has enough bytes, before it allocates.
    template <class T, class A> bool values(std::vector<T, A> & x, uint64_t n) {
        if (n > left() / sizeof(T)) {
            return false;
        }
        x.resize((size_t) n);
        return n == 0 || read(x.data(), (size_t) n * sizeof(T));
    }

  protected:
    void         begin(uint64_t size) { size_ = limit_ = size; }
    virtual bool fetch(void * data, size_t size) = 0;  // reads the next bytes; read() checked that they exist

  private:
    uint64_t size_ = 0, at_ = 0, limit_ = 0;
    uint32_t checksum_ = 0;
};

class FileReader final : public Reader {
  public:
    ~FileReader() override;
    kvedge_status open(const char * path, kvedge_error * err);

  private:
    bool fetch(void * data, size_t size) override;

    std::FILE * file_ = nullptr;
};

class BytesReader final : public Reader {
  public:
    BytesReader(const void * data, size_t size) : next_((const char *) data) { begin(size); }

  private:
    bool fetch(void * data, size_t size) override;

    const char * next_;
};

}  // namespace kvedge
