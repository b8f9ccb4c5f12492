// What the last line of a process needs of the system: crash_posix.cpp and crash_windows.cpp; crash.cpp has the line itself.

#pragma once

#include <cstddef>
#include <cstdint>

namespace kvedge {

// What happened, in the same words on every system.
constexpr char SEGMENTATION[] = "segmentation fault";
constexpr char BUS[]          = "bus error, as of a file that became shorter while it was in use";
constexpr char ARITHMETIC[]   = "arithmetic error";
constexpr char ILLEGAL[]      = "illegal instruction";
constexpr char ABORT[]        = "abort";
constexpr char UNCAUGHT[]     = "an exception that nobody caught";

// For handlers: writes the line and ends the process. Takes no memory, no lock and little stack; of several threads one writes.
[[noreturn]] void end_with(const char * what);

// The system's handlers, where nobody has one; and all as it was again. Called in turns, under a lock.
void take_handlers();
void give_handlers_back();

// Room for a handler in the calling thread when its own stack has overflowed. One that somebody else gave it stays. Called
// again it does nothing. false: no memory.
bool make_handler_stack();

// For handlers.
uintptr_t         thread_number();                                  // of the calling thread; never 0
void              write_to_stderr(const char * text, size_t size);  // as much of it as can be written
[[noreturn]] void end_process(int exit_code);                       // at once: nothing else of the program runs
[[noreturn]] void wait_for_the_end();                               // which another thread brings about

}  // namespace kvedge
