#include "system/unnamed_file.h"

#include "system/error.h"

#include <system_error>

#if defined(_WIN32)
#    define WIN32_LEAN_AND_MEAN
#    include <windows.h>

#    include <filesystem>
#else
#    include <cerrno>
#    include <cstdlib>
#    include <cstring>
#    include <dirent.h>
#    include <fcntl.h>
#    include <sys/mman.h>
#    include <sys/stat.h>
#    include <unistd.h>
#    if defined(__linux__)
#        include <sys/vfs.h>
#    else
#        include <sys/mount.h>
#        include <sys/param.h>
#    endif
#endif

namespace kvedge {

#if defined(_WIN32)

static int last_error() { return (int) GetLastError(); }

UnnamedFile::~UnnamedFile() {
    if (file_) {
        CloseHandle(file_);
    }
}

// Windows has no unnamed files: the system deletes this file when its last handle or mapping is closed.
bool UnnamedFile::open(const std::string & folder) {
    wchar_t    name[MAX_PATH];
    const auto where = std::filesystem::u8path(folder).wstring();
    if (!GetTempFileNameW(where.c_str(), L"kve", 0, name)) {
        return failed("create a file");
    }
    file_ = CreateFileW(name, GENERIC_READ | GENERIC_WRITE, 0, nullptr, CREATE_ALWAYS,
                        FILE_ATTRIBUTE_TEMPORARY | FILE_FLAG_DELETE_ON_CLOSE, nullptr);
    if (file_ == INVALID_HANDLE_VALUE) {
        file_ = nullptr;
        return failed("create a file");
    }
    return true;
}

bool UnnamedFile::write(uint64_t offset, const void * data, size_t size) {
    const auto * from = (const uint8_t *) data;
    while (size > 0) {
        OVERLAPPED  at{};
        const DWORD most = (DWORD) (size < (16u << 20) ? size : (16u << 20));
        DWORD       done = 0;
        at.Offset        = (DWORD) offset;
        at.OffsetHigh    = (DWORD) (offset >> 32);
        if (!WriteFile(file_, from, most, &done, &at) || done == 0) {
            return failed("write a file");
        }
        from += done;
        offset += done;
        size -= done;
    }
    return true;
}

bool UnnamedFile::map(uint64_t offset, size_t size, Pages & out) {
    const HANDLE mapping = CreateFileMappingW(file_, nullptr, PAGE_READONLY, 0, 0, nullptr);
    void *       data    = mapping ? MapViewOfFile(mapping, FILE_MAP_READ, (DWORD) (offset >> 32), (DWORD) offset, size) : nullptr;
    if (!data) {
        failed("map a file");
    }
    if (mapping) {
        CloseHandle(mapping);
    }
    out = data ? Pages::of_file(data, size) : Pages();
    return data != nullptr;
}

static const char * why_not(const std::string & folder) {
    const auto root = std::filesystem::absolute(std::filesystem::u8path(folder)).root_path().wstring();
    return GetDriveTypeW(root.c_str()) == DRIVE_REMOTE ? "is on another machine; use a folder on a local drive" : nullptr;
}

#else

static int last_error() { return errno; }

static constexpr char TEMPLATE[] = "kvedge-rows-XXXXXX";  // name of a file until unlink, if the system has no unnamed files

// Removes files of programs that were killed between mkstemp and unlink. Such files are empty. It is harmless to unlink a file of a
// running program, which would unlink it next.
static void remove_left(const std::string & folder) {
    DIR * const  dir   = opendir(folder.c_str());
    const size_t fixed = sizeof(TEMPLATE) - 1 - 6;
    while (const dirent * entry = dir ? readdir(dir) : nullptr) {
        struct stat file;
        if (strlen(entry->d_name) == sizeof(TEMPLATE) - 1 && strncmp(entry->d_name, TEMPLATE, fixed) == 0 &&
            fstatat(dirfd(dir), entry->d_name, &file, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(file.st_mode) && file.st_size == 0 &&
            file.st_uid == geteuid()) {
            unlinkat(dirfd(dir), entry->d_name, 0);
        }
    }
    if (dir) {
        closedir(dir);
    }
}

UnnamedFile::~UnnamedFile() {
    if (file_ >= 0) {
        ::close(file_);
    }
}

bool UnnamedFile::open(const std::string & folder) {
#    if defined(O_TMPFILE)
    file_ = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (file_ >= 0) {
        return true;
    }
#    endif
    std::string name = folder + "/" + TEMPLATE;  // file systems without unnamed files: unlink the name at once
    file_            = mkstemp(name.data());
    if (file_ < 0) {
        return failed("create a file");
    }
    unlink(name.c_str());
    fcntl(file_, F_SETFD, FD_CLOEXEC);
    return true;
}

bool UnnamedFile::write(uint64_t offset, const void * data, size_t size) {
    const auto * from = (const uint8_t *) data;
    while (size > 0) {
        const ssize_t done = pwrite(file_, from, size, (off_t) offset);
        if (done < 0 && errno == EINTR) {
            continue;
        }
        if (done <= 0) {
            return failed("write a file");
        }
        from += done;
        offset += (uint64_t) done;
        size -= (size_t) done;
    }
    return true;
}

bool UnnamedFile::map(uint64_t offset, size_t size, Pages & out) {
    void * data = mmap(nullptr, size, PROT_READ, MAP_SHARED, file_, (off_t) offset);
    if (data == MAP_FAILED) {
        return failed("map a file");
    }
    out = Pages::of_file(data, size);
    return true;
}

#    if defined(__linux__)

static const char * why_not(const std::string & folder) {
    constexpr uint32_t AWAY[]   = { 0x6969, 0x517b, 0xff534d42, 0xfe534d42, 0x01021997, 0x65735546, 0x00c36400, 0x5346414f, 0x0bd00bd0 };
    constexpr uint32_t MEMORY[] = { 0x01021994, 0x858458f6 };
    struct statfs      fs;  // AWAY: NFS, SMB (three numbers), 9p, FUSE, Ceph, AFS, Lustre. MEMORY: tmpfs, ramfs
    if (statfs(folder.c_str(), &fs) != 0) {
        return nullptr;  // open() will say why
    }
    for (const uint32_t type : AWAY) {
        if ((uint32_t) fs.f_type == type) {
            return "is on a network drive or in user space (FUSE), where an open file can disappear; use a folder on a local drive";
        }
    }
    for (const uint32_t type : MEMORY) {
        if ((uint32_t) fs.f_type == type) {
            return "is in memory (tmpfs), so files there save no memory; use another folder, or keep the rows in memory";
        }
    }
    return nullptr;
}

#    else

static const char * why_not(const std::string & folder) {
    struct statfs fs;
    return statfs(folder.c_str(), &fs) == 0 && !(fs.f_flags & MNT_LOCAL) ? "is on a network drive, where an open file can disappear; use a "
                                                                           "folder on a local drive" : nullptr;
}

#    endif
#endif

bool UnnamedFile::failed(const char * doing) {
    problem_ = std::string("cannot ") + doing + ": " + std::system_category().message(last_error());
    return false;
}

kvedge_status check_folder(const std::string & folder, kvedge_error * err) {
    if (const char * why = why_not(folder)) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "the folder '%s' %s", folder.c_str(), why);
    }
#if !defined(_WIN32)
    remove_left(folder);
#endif
    UnnamedFile file;
    Pages       pages;
    const char  one = 1;
    return file.open(folder) && file.write(0, &one, 1) && file.map(0, 1, pages) && pages.data()[0] == 1
               ? ok(err)
               : fail(err, KVEDGE_E_FILE, "the folder '%s' cannot be used: kvedge %s", folder.c_str(), file.problem().c_str());
}

}  // namespace kvedge
