// A file without a name, in a folder that the caller chooses. No other process can open it. The system deletes it with its last
// mapping, even if the program crashes.

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

    // Offsets for map() must be multiples of ALIGNMENT bytes.
    static constexpr uint64_t ALIGNMENT = 64u << 10;

    // Each returns false if the system refuses; problem() is then the reason as text.
    bool open(const std::string & folder);
    bool write(uint64_t offset, const void * data, size_t size);
    bool map(uint64_t offset, size_t size, Pages & out);  // maps for reading; the mapping outlives this object

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

// Checks that files in the folder can be written and mapped safely. Rejects folders whose files another machine or process could
// remove, and folders in memory. Also removes empty files of programs that were killed before they unlinked the file's name.
// Errors: KVEDGE_E_UNSUPPORTED, KVEDGE_E_FILE.
kvedge_status check_folder(const std::string & folder, kvedge_error * err);

}  // namespace kvedge
