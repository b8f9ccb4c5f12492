// The last line of a process that native code ends.

#include "system/crash.h"
#include "system/error.h"
#include "kvedge-crash.h"

#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>

using namespace kvedge;

namespace {

constexpr int    N_WORDS    = 4;    // a handler may still read the last ones while the next are written
constexpr size_t WHAT_BYTES = 400;  // of an exception's text

struct Words {
    char before[KVEDGE_LAST_WORDS + 1];
    char after[KVEDGE_LAST_WORDS + 1];
    int  exit_code;
};

// The process's, as its handlers are: they are given nothing of ours.
struct State {
    std::mutex             lock;  // of whoever sets, never of a handler
    Words                  words[N_WORDS];
    std::atomic<int>       current{ 0 };
    std::atomic<uintptr_t> ending{ 0 };                                   // the thread that ends the process
    char                   line[2 * KVEDGE_LAST_WORDS + WHAT_BYTES + 2];  // that it writes; its stack may have no room
    bool                   set           = false;
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

[[noreturn]] void on_terminate() {
    char what[WHAT_BYTES];
    what[append(what, 0, UNCAUGHT)] = '\0';
    if (const std::exception_ptr thrown = std::current_exception()) {
        try {
            std::rethrow_exception(thrown);
        } catch (const std::exception & error) {
            const size_t n = strlen(what);
            strncpy(what + n, ": ", sizeof(what) - n - 1);
            strncpy(what + n + 2, error.what(), sizeof(what) - n - 3);
            what[sizeof(what) - 1] = '\0';
        } catch (...) {
        }
    }
    end_with(what);
}

void take_over(State & state) {
    take_handlers();
    state.old_terminate = std::set_terminate(on_terminate);
    state.set           = true;
}

void give_back(State & state) {
    give_handlers_back();
    std::set_terminate(state.old_terminate);
    state.set = false;
}

void copy(char (&out)[KVEDGE_LAST_WORDS + 1], const char * text) {
    strncpy(out, text, KVEDGE_LAST_WORDS);
    out[KVEDGE_LAST_WORDS] = '\0';
}

}  // namespace

void kvedge::end_with(const char * what) {
    State * state = shown.load();
    if (!state) {
        end_process(1);
    }
    const Words &   words = state->words[state->current.load()];
    const uintptr_t me    = thread_number();
    uintptr_t       other = 0;
    if (!state->ending.compare_exchange_strong(other, me)) {
        if (other == me) {
            end_process(words.exit_code);  // what is below failed itself, for want of stack say
        }
        wait_for_the_end();
    }
    char * line = state->line;
    size_t n    = append(line, 0, words.before);
    n           = append(line, n, what);
    n           = append(line, n, words.after);
    line[n++]   = '\n';
    write_to_stderr(line, n);
    end_process(words.exit_code);
}

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
    return make_handler_stack() ? ok(err) : fail(err, KVEDGE_E_MEMORY, "no memory for the stack of a signal handler");
} catch (...) {
    return caught(err, "set the last words");
}
