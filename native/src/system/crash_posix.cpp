// Signals. In a handler nothing is called but what POSIX allows there.

#include "system/crash.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <memory>
#include <new>

namespace kvedge {

namespace {

constexpr int    SIGNALS[]   = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT };
constexpr size_t N_SIGNALS   = sizeof(SIGNALS) / sizeof(SIGNALS[0]);
constexpr size_t STACK_BYTES = 64 << 10;  // the registers of AVX-512 and AMX alone take 11 KiB of a handler's stack

struct Taken {
    bool             ours;
    struct sigaction old;
} taken[N_SIGNALS];

void on_signal(int number) {
    switch (number) {
        case SIGSEGV: end_with(SEGMENTATION);
        case SIGBUS:  end_with(BUS);
        case SIGFPE:  end_with(ARITHMETIC);
        case SIGILL:  end_with(ILLEGAL);
        default:      end_with(ABORT);
    }
}

class HandlerStack {
  public:
    HandlerStack() = default;
    ~HandlerStack() {
        if (memory_) {
            stack_t none{};
            none.ss_flags = SS_DISABLE;
            sigaltstack(&none, nullptr);
        }
    }
    HandlerStack(const HandlerStack &)             = delete;
    HandlerStack & operator=(const HandlerStack &) = delete;

    bool make() {
        stack_t there{};
        if (memory_ || sigaltstack(nullptr, &there) != 0 || !(there.ss_flags & SS_DISABLE)) {
            return true;
        }
        memory_.reset(new (std::nothrow) char[STACK_BYTES]);
        if (!memory_) {
            return false;
        }
        stack_t ours{};
        ours.ss_sp   = memory_.get();
        ours.ss_size = STACK_BYTES;
        if (sigaltstack(&ours, nullptr) != 0) {
            memory_.reset();
            return false;
        }
        return true;
    }

  private:
    std::unique_ptr<char[]> memory_;
};

}  // namespace

void take_handlers() {
    for (size_t i = 0; i < N_SIGNALS; i++) {
        struct sigaction ours {};
        ours.sa_handler = on_signal;
        ours.sa_flags   = SA_ONSTACK;
        sigfillset(&ours.sa_mask);
        struct sigaction & old  = taken[i].old;
        const bool         free = sigaction(SIGNALS[i], nullptr, &old) == 0 && !(old.sa_flags & SA_SIGINFO) && old.sa_handler == SIG_DFL;
        taken[i].ours           = free && sigaction(SIGNALS[i], &ours, nullptr) == 0;
    }
}

void give_handlers_back() {
    for (size_t i = 0; i < N_SIGNALS; i++) {
        if (taken[i].ours) {
            sigaction(SIGNALS[i], &taken[i].old, nullptr);
        }
    }
}

bool make_handler_stack() {
    thread_local HandlerStack stack;
    return stack.make();
}

uintptr_t thread_number() { return (uintptr_t) pthread_self(); }

void write_to_stderr(const char * text, size_t size) {
    while (size > 0) {
        const ssize_t wrote = write(STDERR_FILENO, text, size);
        if (wrote <= 0) {
            return;
        }
        text += wrote;
        size -= (size_t) wrote;
    }
}

void end_process(int exit_code) { _exit(exit_code); }

void wait_for_the_end() {
    for (;;) {
        pause();
    }
}

}  // namespace kvedge
