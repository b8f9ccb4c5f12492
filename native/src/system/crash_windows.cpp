// The filter of exceptions that nobody handles, and SIGABRT of the C library. A handler that sees every exception (a vectored
// one) would see those that are caught as well, and all that C++ throws is one.

#include "system/crash.h"

#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <signal.h>

#include <atomic>

namespace kvedge {

namespace {

constexpr ULONG STACK_BYTES   = 64 << 10;    // what of its stack a thread keeps back for handlers
constexpr DWORD MICROSOFT_CXX = 0xE06D7363;  // what C++ throws, by compiler
constexpr DWORD GCC_CXX       = 0x20474343;

using Filter = LPTOP_LEVEL_EXCEPTION_FILTER;

std::atomic<Filter> old_filter{ nullptr };
void (*old_abort)(int) = SIG_DFL;

// nullptr: nothing that is told of, as a breakpoint.
const char * words_for(DWORD code) {
    switch (code) {
        case EXCEPTION_ACCESS_VIOLATION:
        case EXCEPTION_STACK_OVERFLOW:        return SEGMENTATION;
        case EXCEPTION_IN_PAGE_ERROR:
        case EXCEPTION_DATATYPE_MISALIGNMENT: return BUS;
        case EXCEPTION_INT_DIVIDE_BY_ZERO:
        case EXCEPTION_INT_OVERFLOW:
        case EXCEPTION_FLT_DENORMAL_OPERAND:
        case EXCEPTION_FLT_DIVIDE_BY_ZERO:
        case EXCEPTION_FLT_INEXACT_RESULT:
        case EXCEPTION_FLT_INVALID_OPERATION:
        case EXCEPTION_FLT_OVERFLOW:
        case EXCEPTION_FLT_STACK_CHECK:
        case EXCEPTION_FLT_UNDERFLOW:         return ARITHMETIC;
        case EXCEPTION_ILLEGAL_INSTRUCTION:
        case EXCEPTION_PRIV_INSTRUCTION:      return ILLEGAL;
        case MICROSOFT_CXX:                   return UNCAUGHT;
        default:                              return nullptr;
    }
}

// Runs in the thread that failed, on what is left of its stack.
LONG WINAPI on_exception(EXCEPTION_POINTERS * failed) {
    // the older filter comes first: most often the C library's, which asks the program's own signal() handlers
    if (const Filter old = old_filter.load()) {
        if (const LONG answer = old(failed); answer != EXCEPTION_CONTINUE_SEARCH) {
            return answer;
        }
    }
    const EXCEPTION_RECORD & record = *failed->ExceptionRecord;
    if (record.ExceptionCode == GCC_CXX) {
        // GCC's throw goes on to std::terminate when nobody answers; in a program of another compiler only we can let it
        return record.ExceptionFlags & EXCEPTION_NONCONTINUABLE ? EXCEPTION_CONTINUE_SEARCH : EXCEPTION_CONTINUE_EXECUTION;
    }
    if (const char * what = words_for(record.ExceptionCode)) {
        end_with(what);
    }
    return EXCEPTION_CONTINUE_SEARCH;
}

void on_abort(int) {
    signal(SIGABRT, on_abort);  // the C library has set it back, and another thread may abort meanwhile
    end_with(ABORT);
}

}  // namespace

void take_handlers() {
    const Filter old = SetUnhandledExceptionFilter(on_exception);
    if (old != on_exception) {  // which somebody may have put back
        old_filter.store(old);
    }
    old_abort = signal(SIGABRT, on_abort);
    if (old_abort != SIG_DFL) {
        signal(SIGABRT, old_abort);
    }
}

void give_handlers_back() {
    SetUnhandledExceptionFilter(old_filter.load());
    if (old_abort == SIG_DFL) {
        signal(SIGABRT, SIG_DFL);
    }
}

bool make_handler_stack() {
    thread_local bool made = false;
    if (!made) {
        ULONG there = 0;
        ULONG ours  = STACK_BYTES;
        made        = SetThreadStackGuarantee(&there) && (there >= ours || SetThreadStackGuarantee(&ours));
    }
    return made;
}

uintptr_t thread_number() { return GetCurrentThreadId(); }

void write_to_stderr(const char * text, size_t size) {
    const HANDLE out = GetStdHandle(STD_ERROR_HANDLE);
    while (size > 0) {
        DWORD wrote = 0;
        if (!WriteFile(out, text, (DWORD) size, &wrote, nullptr) || wrote == 0) {
            return;
        }
        text += wrote;
        size -= wrote;
    }
}

void end_process(int exit_code) {
    TerminateProcess(GetCurrentProcess(), (UINT) exit_code);
    wait_for_the_end();
}

void wait_for_the_end() {
    for (;;) {
        Sleep(INFINITE);
    }
}

}  // namespace kvedge
