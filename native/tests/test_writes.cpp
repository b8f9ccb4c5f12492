// Saves a session file while one system call fails, writes less than asked, or the program is killed around it. The file always has the
// old or the new content, and a failed save leaves no other file.

#include "check.h"

#if defined(__linux__)

#    include "system/file.h"

#    include <cerrno>
#    include <csignal>
#    include <cstdlib>
#    include <cstring>
#    include <filesystem>
#    include <fstream>
#    include <iterator>
#    include <random>
#    include <string>

#    include <fcntl.h>
#    include <sys/syscall.h>
#    include <sys/wait.h>
#    include <unistd.h>

namespace fs = std::filesystem;
using namespace kvedge;

namespace {

// The event at one system call of a save.
enum class Event { none, fail, half, killed_before, killed_half_way, killed_after };

struct Script {
    int         at    = 0;
    Event       event = Event::none;
    int         error = EIO;
    int         calls = 0;
    bool        on    = false;
    bool        hit   = false;
    std::string told;  // the calls: o(pen), w(rite), s(ync), c(lose), r(ename), S(ync of a folder), u(nlink)
};
Script script;
int    folder_fd = -1;

[[noreturn]] void end() {
    kill(getpid(), SIGKILL);
    std::abort();
}

// Runs call() with the event that the script has for it. short_call(): writes half of the bytes.
template <class F, class G> long acted(char letter, const F & call, const G & short_call) {
    if (!script.on) {
        return call();
    }
    script.told += letter;
    if (++script.calls != script.at) {
        return call();
    }
    script.hit = true;
    switch (script.event) {
        case Event::none: break;
        case Event::fail: errno = script.error; return -1;
        case Event::half: return short_call();
        case Event::killed_before: end();
        case Event::killed_half_way: short_call(); end();
        case Event::killed_after: call(); end();
    }
    return call();
}

template <class F> long acted(char letter, const F & call) { return acted(letter, call, call); }

}  // namespace

// Replacements of the system calls that libkvedge's files use, directly or through the C++ library.
extern "C" int open(const char * path, int flags, ...) {
    const bool folder = (flags & O_ACCMODE) == O_RDONLY;
    const auto made   = [&] { return syscall(SYS_openat, AT_FDCWD, path, flags, 0600); };
    const auto fd     = (int) (folder ? made() : acted('o', made));
    folder_fd         = folder && script.on ? fd : folder_fd;
    return fd;
}
extern "C" ssize_t write(int fd, const void * data, size_t n) {
    return acted('w', [&] { return syscall(SYS_write, fd, data, n); }, [&] { return syscall(SYS_write, fd, data, (n + 1) / 2); });
}
extern "C" int fsync(int fd) {
    return (int) acted(fd == folder_fd ? 'S' : 's', [&] { return syscall(SYS_fsync, fd); });
}
extern "C" int close(int fd) {
    if (fd == folder_fd) {
        folder_fd = -1;
        return (int) syscall(SYS_close, fd);
    }
    const long code = acted('c', [&] { return syscall(SYS_close, fd); });
    if (code != 0) {
        syscall(SYS_close, fd);  // a failing close() closes the file nevertheless
    }
    return (int) code;
}
extern "C" int rename(const char * from, const char * to) noexcept {
    return (int) acted('r', [&] { return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0); });
}

namespace {

const fs::path folder = fs::temp_directory_path() / ("kvedge-writes-" + std::to_string(std::random_device{}()));
const fs::path file   = folder / "talk.kvs";

// Texts larger than a buffer, one of them written in pieces larger than a buffer.
const std::string before_text(90000, 'a'), after_text = std::string(70000, 'b') + std::string(200000, 'c') + "end";

std::string held() {
    std::ifstream in(file, std::ios::binary);
    return { std::istreambuf_iterator<char>(in), {} };
}

kvedge_status save(const std::string & text, kvedge_error * err) {
    FileWriter    writer;
    kvedge_status status = writer.open(file.c_str(), err);
    if (status == KVEDGE_OK) {
        writer.write(text.data(), 70000);
        writer.write(text.data() + 70000, text.size() - 70003);
        writer.write(text.data() + text.size() - 3, 3);
        status = writer.commit(err);
    }
    return status;
}

// Saves after_text with an event at system call number `at`.
kvedge_status scripted(Event event, int at, int error, kvedge_error * err) {
    script       = {};
    script.event = event;
    script.at    = at;
    script.error = error;
    script.on    = true;
    const auto status = save(after_text, err);
    script.on         = false;
    return status;
}

void put_before() {
    for (const auto & entry : fs::directory_iterator(folder)) {
        fs::remove(entry.path());
    }
    kvedge_error err{};
    CHECK(save(before_text, &err) == KVEDGE_OK && held() == before_text);
}

std::ptrdiff_t entries() { return std::distance(fs::directory_iterator(folder), fs::directory_iterator()); }

// Checks the order of calls that protects against power loss: the new file is synced before it is renamed, its folder afterwards.
// Returns the calls.
std::string test_order() {
    put_before();
    kvedge_error err{};
    CHECK(scripted(Event::none, 0, 0, &err) == KVEDGE_OK && held() == after_text);
    const size_t first = script.told.find('w'), last = script.told.rfind('w');
    CHECK(script.told.find('o') == 0 && first == 1);
    CHECK(script.told.substr(first, last + 1 - first) == std::string(last, 'w'));
    CHECK(script.told.substr(last + 1) == "scrS");
    return script.told;
}

void test_failures(const std::string & calls) {
    for (int at = 1; at <= (int) calls.size(); at++) {
        for (const int error : { ENOSPC, EIO, EDQUOT }) {
            put_before();
            kvedge_error err{};
            const bool   harmless = calls[(size_t) at - 1] == 'S';  // the new file is complete before the folder is synced
            const auto   status   = scripted(Event::fail, at, error, &err);
            CHECK(script.hit && status == (harmless ? KVEDGE_OK : KVEDGE_E_FILE));
            CHECK(held() == (harmless ? after_text : before_text) && entries() == 1);
            CHECK(harmless || strstr(err.message, strerror(error)));
        }
        if (calls[(size_t) at - 1] == 'w') {
            put_before();
            kvedge_error err{};
            CHECK(scripted(Event::half, at, 0, &err) == KVEDGE_OK && held() == after_text);  // another call writes the rest
            CHECK(scripted(Event::fail, at, EINTR, &err) == KVEDGE_OK && held() == after_text);
        }
    }
}

// Checks that the file has the old or the new content, and that only a temporary file, which the next start removes, lies beside it.
void check_after_kill(pid_t gone) {
    const std::string now = held();
    CHECK(now == before_text || now == after_text);
    CHECK(entries() <= 2);
    for (const auto & entry : fs::directory_iterator(folder)) {
        CHECK(entry.path() == file || entry.path().filename() == "talk.kvs." + std::to_string(gone) + "-0.part");
    }
}

void test_kills(const std::string & calls) {
    for (const Event event : { Event::killed_before, Event::killed_half_way, Event::killed_after }) {
        for (int at = 1; at <= (int) calls.size(); at++) {
            put_before();
            const pid_t child = fork();
            if (child == 0) {
                kvedge_error err{};
                scripted(event, at, 0, &err);
                _exit(1);
            }
            int status = 0;
            CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
            check_after_kill(child);
            const bool there = calls.substr(0, (size_t) at).find('r') != std::string::npos;  // at or after the rename
            CHECK(held() == (there && !(calls[(size_t) at - 1] == 'r' && event == Event::killed_before) ? after_text : before_text));
        }
    }
}

}  // namespace

int main() {
    fs::create_directory(folder);
    const std::string calls = test_order();
    test_failures(calls);
    test_kills(calls);
    fs::remove_all(folder);
    std::fprintf(stderr, "%s, %d failures\n", calls.c_str(), failures());
    return failures() != 0;
}

#else

int main() {
    std::fprintf(stderr, "not run: the calls of a file are taken over as Linux's linker allows it\n");
    return 0;
}

#endif
