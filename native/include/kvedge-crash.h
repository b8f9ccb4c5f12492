// kvedge-crash.h - the last line of a program that native code ends: a segmentation fault, an abort, an exception that nobody
// catches. Included by kvedge.h, whose conventions hold but for two: signals and their handlers are the whole process's, and
// the handler that is set up here writes to stderr.
//
// It is for programs, not for libraries in somebody else's. Nothing is saved in a handler, where no memory may be asked for
// and no lock waited for: what is to outlive a crash is saved before.
//
//     kvedge_last_words("mine: error: native code crashed while the prompt was read: ", "; the log is in mine.log", 1, &err);
//     ... llama_decode(ctx, prompt) ...
//     kvedge_last_words("mine: error: native code crashed: ", "", 1, &err);

#ifndef KVEDGE_CRASH_H
#define KVEDGE_CRASH_H

#include "kvedge.h"

#ifdef __cplusplus
extern "C" {
#endif

// From now on SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT and std::terminate write one line to stderr - `before`, what happened
// ("segmentation fault"), `after` - and end the process at once with exit_code, in place of a signal and a core file. On
// Windows it is the exceptions that mean the same (an access violation is a segmentation fault), where nobody handles them,
// and the C library's SIGABRT.
//
// before, after: copied; at most KVEDGE_LAST_WORDS bytes of each are written. before NULL: all is again as it was before the
// first call. exit_code: 1 to 255. Any thread may call it, again and again, in about a microsecond. A thread that calls it
// also gets a stack for the handler, freed when the thread ends, so that an overflow of its own stack is told as well; on
// Windows 64 KiB of its own stack are kept back, for as long as it runs.
//
// A signal that has a handler already keeps it (Python's faulthandler, a sanitizer); one that is ignored stays so. On Windows
// an older filter of unhandled exceptions is asked first, and if it goes on or ends the process, nothing is written. What
// cannot be told: SIGKILL, which the system sends when memory ends, and a stack that overflows in a thread that never called
// this; on Windows besides, what ends a process past every filter (__fastfail, a heap that the system finds corrupt), the
// abort() of another C library than kvedge's, and whatever a debugger sees first.
// Errors: KVEDGE_E_ARGUMENT; KVEDGE_E_MEMORY, without the stack.
#define KVEDGE_LAST_WORDS 2000
KVEDGE_API kvedge_status kvedge_last_words(const char * before, const char * after, int32_t exit_code, kvedge_error * err);

#ifdef __cplusplus
}
#endif

#endif  // KVEDGE_CRASH_H
