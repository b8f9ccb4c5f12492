// A file without a name, in a folder that the caller chose: nobody else can open it, and it is gone with the last mapping of
// it, however the program ends.

#pragma once

#include "kvedge.h"
#include "system/pages.h"

#include <cstdint>
#include <string>

namespace kvedge {

class UnnamedFile {
  public:
    UnnamedFile() = default;
    ~UnnamedFile();
    UnnamedFile(const UnnamedFile &)             = delete;
    UnnamedFile & operator=(const UnnamedFile &) = delete;

    // Offsets of map() are multiples of it.
    static constexpr uint64_t ALIGNMENT = 64u << 10;

    // What follows returns false where the system refuses, and problem() says in words what it said.
    bool open(const std::string & folder);
    bool write(uint64_t offset, const void * data, size_t size);
    bool map(uint64_t offset, size_t size, Pages & out);  // to be read; it outlives the file's handle

    const std::string & problem() const { return problem_; }

  private:
    bool failed(const char * doing);

#if defined(_WIN32)
    void * file_ = nullptr;
#else
    int file_ = -1;
#endif
    std::string problem_;
};

// Whether files of the folder can be written, and mapped without harm: not where another machine may take them away. Removes
// empty files that were left of programs which were killed before a file had lost its name.
// Errors: KVEDGE_E_UNSUPPORTED, KVEDGE_E_FILE.
kvedge_status check_folder(const std::string & folder, kvedge_error * err);

}  // namespace kvedge
