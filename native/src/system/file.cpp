#include "system/file.h"

#include "system/error.h"
#include "system/crc32.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

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

// Creates a new file that only its owner may read, because conversations are private (on Windows, the folder's rights apply).
// Returns the descriptor; -1: failed, with the reason in errno.
int create(const fs::path & path) {
#if defined(_WIN32)
    return _wopen(path.c_str(), _O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY | _O_NOINHERIT, _S_IREAD | _S_IWRITE);
#else
    return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
#endif
}

constexpr size_t BUFFER = 64u << 10, LARGEST = 1u << 30;  // bytes of the write buffer, and most bytes of one system call

// Returns the number of bytes written, which may be less than `size`; negative: failed, with the reason in errno.
std::ptrdiff_t write_some(int file, const uint8_t * data, size_t size) {
#if defined(_WIN32)
    return _write(file, data, (unsigned) std::min(size, LARGEST));
#else
    return ::write(file, data, std::min(size, LARGEST));
#endif
}

bool to_disk(int file) {
#if defined(_WIN32)
    return _commit(file) == 0;
#else
    return fsync(file) == 0;
#endif
}

bool close_file(int file) {
#if defined(_WIN32)
    return _close(file) == 0;
#else
    return close(file) == 0;
#endif
}

// Replaces `path` by `part` in one step; on failure `path` is unchanged. Then syncs the folder, so that the rename survives a power
// failure. An error of that sync is ignored, because the file is complete anyway.
std::error_code replace(const fs::path & part, const fs::path & path) {
#if defined(_WIN32)
    const bool done = MoveFileExW(part.c_str(), path.c_str(), MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH);
    return done ? std::error_code() : std::error_code((int) GetLastError(), std::system_category());
#else
    const fs::path  folder = path.parent_path();  // before the rename, because it may throw and nothing may fail afterwards
    std::error_code code;
    fs::rename(part, path, code);
    if (code) {
        return code;
    }
    const int      fd     = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        (void) fsync(fd);
        close(fd);
    }
    return code;
#endif
}

// Returns whether a file is read-only. Such a file must not be replaced, although the folder's rights would allow it.
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

}  // namespace

int process_id() {
#if defined(_WIN32)
    return _getpid();
#else
    return (int) getpid();
#endif
}

FileWriter::~FileWriter() {
    if (is_open()) {
        close_file(file_);
    }
    if (!part_.empty()) {
        std::error_code ignored;
        fs::remove(part_, ignored);
    }
}

kvedge_status FileWriter::open(const char * path, kvedge_error * err) {
    std::error_code code;
    fs::path        place = fs::u8path(path);
    if (const fs::path real = fs::canonical(place, code); !code) {
        place = real;  // a symbolic link stays; its target is replaced
    } else if (const fs::path target = fs::read_symlink(place, code); !code) {
        place = place.parent_path() / target;  // a link whose target does not exist yet
    }
    const fs::file_status there = fs::status(place, code);
    if (fs::exists(there) && !fs::is_regular_file(there)) {
        return fail(err, KVEDGE_E_FILE, "%s is not a file; give the name of a file", path);
    }
    if (fs::exists(there) && is_read_only(place, there)) {
        return fail(err, KVEDGE_E_FILE, "%s is read-only; make the file writable, or use another file", path);
    }
    path_ = std::move(place);
    buffer_.reserve(BUFFER);
    for (int i = 0; i < 100 && !is_open(); i++) {
        fs::path part = path_;
        part += "." + std::to_string(process_id()) + "-" + std::to_string(i) + ".part";
        file_ = create(part);
        if (is_open()) {
            part_ = std::move(part);  // a move cannot throw; from here on the destructor removes the file
        } else if (errno != EEXIST) {
            break;
        }
    }
    return is_open() ? ok(err) : fail(err, KVEDGE_E_FILE, "%s cannot be written: %s", path, last_error().message().c_str());
}

void FileWriter::put(const void * data, size_t size) {
    if (buffer_.size() + size > BUFFER) {
        flush();
    }
    if (size > BUFFER) {
        send((const uint8_t *) data, size);
    } else if (size > 0) {
        buffer_.insert(buffer_.end(), (const uint8_t *) data, (const uint8_t *) data + size);  // within the reserved capacity
    }
}

void FileWriter::flush() {
    send(buffer_.data(), buffer_.size());
    buffer_.clear();
}

void FileWriter::send(const uint8_t * data, size_t size) {
    while (size > 0 && !failed_) {
        errno                  = 0;
        const std::ptrdiff_t n = write_some(file_, data, size);
        if (n > 0) {
            data += n;
            size -= (size_t) n;
        } else if (errno != EINTR) {
            failed_ = last_error();
        }
    }
}

kvedge_status FileWriter::commit(kvedge_error * err) {
    flush();
    if (!failed_ && !to_disk(file_)) {
        failed_ = last_error();
    }
    if (!close_file(file_) && !failed_) {
        failed_ = last_error();
    }
    file_ = -1;
#if !defined(_WIN32)
    // keep the permissions of the replaced file, because its owner may have changed them
    std::error_code unknown;
    if (const fs::file_status there = fs::status(path_, unknown); !failed_ && fs::exists(there)) {
        fs::permissions(part_, there.permissions(), unknown);
    }
#endif
    if (!failed_) {
        failed_ = replace(part_, path_);
    }
    if (failed_) {
        return fail(err, KVEDGE_E_FILE, "%s cannot be written: %s; an older file of this name is unchanged", path_.u8string().c_str(),
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
    const uint64_t size = fs::file_size(place, code);
#if defined(_WIN32)
    file_ = code ? nullptr : _wfopen(place.c_str(), L"rbN");  // N: child processes do not inherit it
#else
    file_ = code ? nullptr : fopen(place.c_str(), "rbe");
#endif
    if (!file_) {
        return fail(err, KVEDGE_E_FILE, "%s cannot be read: %s", path, (code ? code : last_error()).message().c_str());
    }
    begin(size);
    return ok(err);
}

bool FileReader::fetch(void * data, size_t size) { return fread(data, 1, size, file_) == size; }

bool BytesReader::fetch(void * data, size_t size) {
    memcpy(data, next_, size);
    next_ += size;
    return true;
}

bool Reader::read(void * data, size_t size) {
    if (size > left() || !fetch(data, size)) {
        return false;
    }
    at_ += size;
    checksum_ = crc32(checksum_, data, size);
    return true;
}

bool Reader::skip() {
    std::vector<uint8_t> nobodys((size_t) std::min<uint64_t>(left(), BUFFER));
    while (left() > 0) {
        if (!read(nobodys.data(), (size_t) std::min<uint64_t>(left(), nobodys.size()))) {
            return false;
        }
    }
    return true;
}

uint32_t Reader::take_checksum() { return std::exchange(checksum_, 0u); }

void SummedSink::write(const void * data, size_t size) {
    Sink::write(data, size);
    checksum_ = crc32(checksum_, data, size);
    put(data, size);
}

uint32_t SummedSink::take_checksum() { return std::exchange(checksum_, 0u); }

void BytesWriter::put(const void * data, size_t size) {
    const size_t n = std::min(size, left_);
    if (n > 0) {
        memcpy(at_, data, n);
    }
    at_ += n;
    left_ = size > left_ ? 0 : left_ - size;
}

}  // namespace kvedge
