// The last line of a process that native code ends.

#include "core/error.h"
#include "kvedge-crash.h"

#if !defined(_WIN32)
#    include <signal.h>
#    include <unistd.h>

#    include <atomic>
#    include <cstring>
#    include <exception>
#    include <memory>
#    include <mutex>
#    include <new>
#endif

using namespace kvedge;

#if defined(_WIN32)

extern "C" kvedge_status kvedge_last_words(const char *, const char *, int32_t, kvedge_error * err) try {
    return fail(err, KVEDGE_E_UNSUPPORTED, "kvedge_last_words: Windows tells of a crash by itself");
} catch (...) {
    return caught(err, "set the last words");
}

#else

namespace {

constexpr int    SIGNALS[]    = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT };
constexpr size_t N_SIGNALS    = sizeof(SIGNALS) / sizeof(SIGNALS[0]);
constexpr size_t STACK_BYTES  = 64 << 10;  // the registers of AVX-512 and AMX alone take 11 KiB of a handler's stack
constexpr int    N_WORDS      = 4;         // a handler may still read the last ones while the next are written
constexpr size_t WHAT_BYTES   = 400;       // of an exception's text

struct Words {
    char before[KVEDGE_LAST_WORDS + 1];
    char after[KVEDGE_LAST_WORDS + 1];
    int  exit_code;
};

// The process's, as the signals are: a handler is given nothing but a number.
struct State {
    std::mutex             lock;  // of whoever sets, never of a handler
    Words                  words[N_WORDS];
    std::atomic<int>       current{ 0 };
    std::atomic_flag       ending = ATOMIC_FLAG_INIT;
    bool                   set    = false;
    bool                   taken[N_SIGNALS];
    struct sigaction       old[N_SIGNALS];
    std::terminate_handler old_terminate = nullptr;
};

State & state() {
    static auto * one = new State();  // never destroyed: a crash may come when the process winds down
    return *one;
}
std::atomic<State *> shown{ nullptr };  // what a handler sees of it

size_t append(char * line, size_t at, const char * text) {
    const size_t n = strlen(text);
    memcpy(line + at, text, n);
    return at + n;
}

// Only what POSIX allows in a handler is called.
[[noreturn]] void end(const char * what) {
    State * state = shown.load();
    if (!state) {
        _exit(1);
    }
    while (state->ending.test_and_set()) {
        pause();  // another thread ends the process
    }
    const Words & words = state->words[state->current.load()];
    char          line[2 * KVEDGE_LAST_WORDS + WHAT_BYTES + 2];
    size_t        n = append(line, 0, words.before);
    n               = append(line, n, what);
    n               = append(line, n, words.after);
    line[n++]       = '\n';
    for (size_t done = 0; done < n;) {
        const ssize_t wrote = write(STDERR_FILENO, line + done, n - done);
        if (wrote <= 0) {
            break;
        }
        done += (size_t) wrote;
    }
    _exit(words.exit_code);
}

void on_signal(int number) {
    switch (number) {
        case SIGSEGV: end("segmentation fault");
        case SIGBUS:  end("bus error, as of a file that became shorter while it was in use");
        case SIGFPE:  end("arithmetic error");
        case SIGILL:  end("illegal instruction");
        default:      end("abort");
    }
}

[[noreturn]] void on_terminate() {
    char what[WHAT_BYTES] = "an exception that nobody caught";
    if (const std::exception_ptr thrown = std::current_exception()) {
        try {
            std::rethrow_exception(thrown);
        } catch (const std::exception & error) {
            const size_t n = strlen(what);
            strncpy(what + n, ": ", sizeof(what) - n - 1);
            strncpy(what + n + 2, error.what(), sizeof(what) - n - 3);
        } catch (...) {
        }
    }
    end(what);
}

// The calling thread's stack for handlers. One that somebody else gave it stays.
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

    // false: no memory.
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

void take_over(State & state) {
    for (size_t i = 0; i < N_SIGNALS; i++) {
        struct sigaction ours {};
        ours.sa_handler = on_signal;
        ours.sa_flags   = SA_ONSTACK;
        sigfillset(&ours.sa_mask);
        const bool free = sigaction(SIGNALS[i], nullptr, &state.old[i]) == 0 &&
            !(state.old[i].sa_flags & SA_SIGINFO) && state.old[i].sa_handler == SIG_DFL;
        state.taken[i] = free && sigaction(SIGNALS[i], &ours, nullptr) == 0;
    }
    state.old_terminate = std::set_terminate(on_terminate);
    state.set           = true;
}

void give_back(State & state) {
    for (size_t i = 0; i < N_SIGNALS; i++) {
        if (state.taken[i]) {
            sigaction(SIGNALS[i], &state.old[i], nullptr);
        }
    }
    std::set_terminate(state.old_terminate);
    state.set = false;
}

void copy(char (&out)[KVEDGE_LAST_WORDS + 1], const char * text) {
    strncpy(out, text, KVEDGE_LAST_WORDS);
    out[KVEDGE_LAST_WORDS] = '\0';
}

}  // namespace

extern "C" kvedge_status kvedge_last_words(const char * before, const char * after, int32_t exit_code, kvedge_error * err) try {
    State &                           at = state();
    const std::lock_guard<std::mutex> hold(at.lock);
    if (!before) {
        if (at.set) {
            give_back(at);
        }
        return ok(err);
    }
    if (!after || exit_code < 1 || exit_code > 255) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_last_words: %s",
                    after ? "exit_code must be 1 to 255" : "after is NULL; \"\" says nothing more");
    }
    const int next = (at.current.load() + 1) % N_WORDS;
    copy(at.words[next].before, before);
    copy(at.words[next].after, after);
    at.words[next].exit_code = exit_code;
    at.current.store(next);
    shown.store(&at);
    if (!at.set) {
        take_over(at);
    }
    thread_local HandlerStack stack;
    return stack.make() ? ok(err) : fail(err, KVEDGE_E_MEMORY, "no memory for the stack of a signal handler");
} catch (...) {
    return caught(err, "set the last words");
}

#endif
