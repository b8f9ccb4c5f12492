#include "session/file.h"

#include "core/error.h"
#include "session/crc32.h"

#include <cerrno>
#include <filesystem>
#include <system_error>

#include <fcntl.h>
#if defined(_WIN32)
#    define WIN32_LEAN_AND_MEAN
#    include <windows.h>
#    include <io.h>
#    include <process.h>
#    include <sys/stat.h>
#else
#    include <unistd.h>
#endif

namespace fs = std::filesystem;

namespace kvedge {

namespace {

std::error_code last_error() { return { errno ? errno : EIO, std::generic_category() }; }

// A file of our own that nobody else may read: conversations are private. On Windows its folder says who may. NULL: errno
// says why.
std::FILE * create(const fs::path & path) {
#if defined(_WIN32)
    const int fd = _wopen(path.c_str(), _O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY | _O_NOINHERIT, _S_IREAD | _S_IWRITE);
    return fd < 0 ? nullptr : _fdopen(fd, "wb");
#else
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    return fd < 0 ? nullptr : fdopen(fd, "wb");
#endif
}

bool flush_to_disk(std::FILE * file) {
#if defined(_WIN32)
    return fflush(file) == 0 && _commit(_fileno(file)) == 0;
#else
    return fflush(file) == 0 && fsync(fileno(file)) == 0;
#endif
}

// `part` takes the place of `path` in one step, or `path` stays as it was. A renamed file outlives a power failure only when
// its folder is on the disk too; where that fails, it is still whole.
std::error_code replace(const fs::path & part, const fs::path & path) {
#if defined(_WIN32)
    const bool done = MoveFileExW(part.c_str(), path.c_str(), MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH);
    return done ? std::error_code() : std::error_code((int) GetLastError(), std::system_category());
#else
    std::error_code code;
    fs::rename(part, path, code);
    if (code) {
        return code;
    }
    const fs::path folder = path.parent_path();
    const int      fd     = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        (void) fsync(fd);
        close(fd);
    }
    return code;
#endif
}

// A file that nobody may write to is not replaced either, though its folder would allow it.
bool is_read_only(const fs::path & path, const fs::file_status & there) {
    const fs::perms writers = fs::perms::owner_write | fs::perms::group_write | fs::perms::others_write;
    if ((there.permissions() & writers) == fs::perms::none) {
        return true;
    }
#if defined(_WIN32)
    (void) path;
    return false;
#else
    return access(path.c_str(), W_OK) != 0;
#endif
}

int process_id() {
#if defined(_WIN32)
    return _getpid();
#else
    return (int) getpid();
#endif
}

}  // namespace

FileWriter::~FileWriter() {
    if (file_) {
        fclose(file_);
    }
    if (!part_.empty()) {
        std::error_code ignored;
        fs::remove(fs::u8path(part_), ignored);
    }
}

kvedge_status FileWriter::open(const char * path, kvedge_error * err) {
    std::error_code code;
    fs::path        place = fs::u8path(path);
    if (const fs::path real = fs::canonical(place, code); !code) {
        place = real;  // a link stays a link
    } else if (const fs::path target = fs::read_symlink(place, code); !code) {
        place = place.parent_path() / target;  // of one whose file is not there yet
    }
    const fs::file_status there = fs::status(place, code);
    if (fs::exists(there) && !fs::is_regular_file(there)) {
        return fail(err, KVEDGE_E_FILE, "%s is not a file; give the name of a file", path);
    }
    if (fs::exists(there) && is_read_only(place, there)) {
        return fail(err, KVEDGE_E_FILE, "%s is read-only; allow writing to it, or use another file", path);
    }
    path_ = place.u8string();
    for (int i = 0; i < 100 && !file_; i++) {
        const std::string part = path_ + "." + std::to_string(process_id()) + "-" + std::to_string(i) + ".part";
        file_                  = create(fs::u8path(part));
        if (file_) {
            part_ = part;
        } else if (errno != EEXIST) {
            break;
        }
    }
    return file_ ? ok(err) : fail(err, KVEDGE_E_FILE, "%s cannot be written: %s", path, last_error().message().c_str());
}

void FileWriter::write(const void * data, size_t size) {
    Sink::write(data, size);
    checksum_ = crc32(checksum_, data, size);
    if (!failed_ && fwrite(data, 1, size, file_) != size) {
        failed_ = last_error();
    }
}

uint32_t FileWriter::take_checksum() {
    const uint32_t sum = checksum_;
    checksum_          = 0;
    return sum;
}

kvedge_status FileWriter::commit(kvedge_error * err) {
    if (!failed_ && !flush_to_disk(file_)) {
        failed_ = last_error();
    }
    if (fclose(file_) != 0 && !failed_) {
        failed_ = last_error();
    }
    file_ = nullptr;
#if !defined(_WIN32)
    // who may read a conversation is for its owner to say, once it is there
    std::error_code unknown;
    if (const fs::file_status there = fs::status(fs::u8path(path_), unknown); !failed_ && fs::exists(there)) {
        fs::permissions(fs::u8path(part_), there.permissions(), unknown);
    }
#endif
    if (!failed_) {
        failed_ = replace(fs::u8path(part_), fs::u8path(path_));
    }
    if (failed_) {
        return fail(err, KVEDGE_E_FILE, "%s cannot be written: %s; what was there before is untouched", path_.c_str(),
                    failed_.message().c_str());
    }
    part_.clear();
    return ok(err);
}

FileReader::~FileReader() {
    if (file_) {
        fclose(file_);
    }
}

kvedge_status FileReader::open(const char * path, kvedge_error * err) {
    std::error_code       code;
    const fs::path        place = fs::u8path(path);
    const fs::file_status there = fs::status(place, code);
    if (!fs::exists(there)) {
        return fail(err, KVEDGE_E_FILE, "%s does not exist", path);
    }
    if (!fs::is_regular_file(there)) {
        return fail(err, KVEDGE_E_FILE, "%s is not a file", path);
    }
    size_ = fs::file_size(place, code);
#if defined(_WIN32)
    file_ = code ? nullptr : _wfopen(place.c_str(), L"rbN");  // N: not for the programs that this one starts
#else
    file_ = code ? nullptr : fopen(place.c_str(), "rbe");
#endif
    if (!file_) {
        return fail(err, KVEDGE_E_FILE, "%s cannot be read: %s", path, (code ? code : last_error()).message().c_str());
    }
    limit_ = size_;
    return ok(err);
}

bool FileReader::read(void * data, size_t size) {
    if (size > left() || fread(data, 1, size, file_) != size) {
        return false;
    }
    at_ += size;
    checksum_ = crc32(checksum_, data, size);
    return true;
}

uint32_t FileReader::take_checksum() {
    const uint32_t sum = checksum_;
    checksum_          = 0;
    return sum;
}

}  // namespace kvedge
