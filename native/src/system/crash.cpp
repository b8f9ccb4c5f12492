// kvedge_last_words: a crash handler that writes a prepared line to stderr and ends the process. The handler allocates no memory
// and takes no lock.

#include "kvedge.h"
#include "system/error.h"

#include <signal.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>

#if defined(_WIN32)
#    define WIN32_LEAN_AND_MEAN
#    include <windows.h>
#else
#    include <unistd.h>
#endif

using namespace kvedge;

namespace {

constexpr size_t STACK_BYTES = 64 << 10;  // stack of a handler; the saved AVX-512 and AMX registers alone need 11 KiB
constexpr char   UNCAUGHT[]  = "an uncaught exception";

struct Words {
    char before[KVEDGE_LAST_WORDS + 1];
    char after[KVEDGE_LAST_WORDS + 1];
    int  exit_code;
};

// Global, because signal handlers are global. The words rotate through 4 slots: a handler may still read the last ones while a thread
// writes the next ones.
std::mutex                 lock;
Words                      words[4];
size_t                     n_set = 0;
std::atomic<const Words *> now{ nullptr };
std::atomic<bool>          ending{ false };

#if defined(_WIN32)
void put(const char * text) {
    DWORD wrote = 0;
    WriteFile(GetStdHandle(STD_ERROR_HANDLE), text, (DWORD) strlen(text), &wrote, nullptr);
}
void wait_a_second() { Sleep(1000); }
void end_process(int exit_code) { TerminateProcess(GetCurrentProcess(), (UINT) exit_code); }
#else
void put(const char * text) {
    if (write(STDERR_FILENO, text, strlen(text)) < 0) {
        return;  // stderr cannot be written; nothing else can be done
    }
}
void wait_a_second() { sleep(1); }
void end_process(int exit_code) { _exit(exit_code); }
#endif

// If several threads crash, the first one writes. The others wait a second for it and then end the process, because it may fail.
[[noreturn]] void end_with(const char * what, const char * colon = "", const char * more = "") {
    const Words & last = *now.load();
    if (ending.exchange(true)) {
        wait_a_second();
    } else {
        for (const char * text : { last.before, what, colon, more, last.after, "\n" }) {
            put(text);
        }
    }
    for (;;) {
        end_process(last.exit_code);
    }
}

[[noreturn]] void on_terminate() {
    try {
        if (std::current_exception()) {
            throw;
        }
    } catch (const std::exception & error) {
        end_with(UNCAUGHT, ": ", error.what());
    } catch (...) {
    }
    end_with(UNCAUGHT);
}

[[noreturn]] void on_signal(int number) {
    end_with(number == SIGSEGV   ? "segmentation fault"
             : number == SIGFPE  ? "arithmetic error"
             : number == SIGILL  ? "illegal instruction"
             : number == SIGABRT ? "abort"
                                 : "bus error, for example because a file became shorter while it was in use");
}

#if defined(_WIN32)

LPTOP_LEVEL_EXCEPTION_FILTER older = nullptr;

// Handles exceptions that the program does not handle. Calls the older filter first. Most often that is the C library's, which
// calls the program's signal() handlers and passes its own compiler's C++ exceptions to std::terminate.
LONG WINAPI on_exception(EXCEPTION_POINTERS * failed) {
    if (const LONG answer = older ? older(failed) : EXCEPTION_CONTINUE_SEARCH; answer != EXCEPTION_CONTINUE_SEARCH) {
        return answer;
    }
    switch (failed->ExceptionRecord->ExceptionCode) {
        case EXCEPTION_ACCESS_VIOLATION:
        case EXCEPTION_STACK_OVERFLOW:      on_signal(SIGSEGV);
        case EXCEPTION_IN_PAGE_ERROR:       on_signal(0);
        case EXCEPTION_INT_DIVIDE_BY_ZERO:  on_signal(SIGFPE);
        case EXCEPTION_ILLEGAL_INSTRUCTION: on_signal(SIGILL);
        case 0xE06D7363:                    end_with(UNCAUGHT);  // a C++ exception of Microsoft's compiler
        case 0x20474343:                    end_with(UNCAUGHT);  // a C++ exception of GCC
        default:                            return EXCEPTION_CONTINUE_SEARCH;
    }
}

void take_handlers() {
    ULONG bytes = STACK_BYTES;
    SetThreadStackGuarantee(&bytes);
    older = SetUnhandledExceptionFilter(on_exception);
    if (const auto old = signal(SIGABRT, on_signal); old != SIG_DFL) {
        signal(SIGABRT, old);
    }
}

#else

void take_handlers() {
    static char stack[STACK_BYTES];
    stack_t     there{}, ours{};
    ours.ss_sp   = stack;
    ours.ss_size = sizeof(stack);
    if (sigaltstack(nullptr, &there) == 0 && there.ss_flags & SS_DISABLE) {
        sigaltstack(&ours, nullptr);
    }
    struct sigaction old {}, handler {};
    handler.sa_handler = on_signal;
    handler.sa_flags   = SA_ONSTACK;
    sigfillset(&handler.sa_mask);
    for (const int number : { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT }) {
        if (sigaction(number, nullptr, &old) == 0 && !(old.sa_flags & SA_SIGINFO) && old.sa_handler == SIG_DFL) {
            sigaction(number, &handler, nullptr);
        }
    }
}

#endif

}  // namespace

extern "C" kvedge_status kvedge_last_words(const char * before, const char * after, int32_t exit_code, kvedge_error * err) try {
    if (!before || !after || exit_code < 1 || exit_code > 255) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_last_words: %s",
                    before && after ? "exit_code must be 1 to 255" : "before or after is NULL; pass \"\" for an empty text");
    }
    const std::lock_guard<std::mutex> hold(lock);
    Words &                           next = words[n_set % 4];
    strncpy(next.before, before, KVEDGE_LAST_WORDS);  // the last byte of the array is never written and stays 0
    strncpy(next.after, after, KVEDGE_LAST_WORDS);
    next.exit_code = exit_code;
    now.store(&next);
    if (n_set++ == 0) {
        take_handlers();
        std::set_terminate(on_terminate);
    }
    return ok(err);
} catch (...) {
    return caught(err, "set the text of the crash handler");
}
