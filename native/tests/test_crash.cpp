// Tests kvedge_last_words: child processes end in every way that it reports; checks their last line and exit code.

#include "check.h"
#include "kvedge.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include <signal.h>
#if !defined(_WIN32)
#    include <sys/wait.h>
#    include <unistd.h>
#endif

namespace {

void set(const char * before = "mine: ", const char * after = "; kept") {
    CHECK(kvedge_last_words(before, after, 7, nullptr) == KVEDGE_OK);
}

void throws() { throw std::runtime_error("no such luck"); }
void faults() {
#if defined(_WIN32)
    volatile int * volatile nowhere = (volatile int *) 8;
    *nowhere                        = 1;
#else
    raise(SIGSEGV);  // a sanitizer would report a real access first
#endif
}

int overflow(volatile int * above) {
    volatile int here[256] = { *above };
    return *above == 1 ? 0 : overflow(here) + here[0];
}

void says_much_in_turn() {
    for (int i = 0; i < 9; i++) {
        set(("step " + std::to_string(i) + ": ").c_str(), ".");
    }
    std::abort();
}

const std::string FAULT = "mine: segmentation fault; kept\n", MOST(KVEDGE_LAST_WORDS, 'x');

const struct Case {
    int number;  // a signal that a sanitizer may handle itself; 0: none
    void (*work)();
    std::string said;
} CASES[] = {
    { SIGSEGV, faults, FAULT },
    { SIGSEGV, [] { std::thread(faults).join(); }, FAULT },
    { 0, std::abort, "mine: abort; kept\n" },
    { 0, throws, "mine: an uncaught exception: no such luck; kept\n" },
    { 0, [] { std::thread([] { throw 3; }).join(); }, "mine: an uncaught exception; kept\n" },
    { 0, says_much_in_turn, "step 8: abort.\n" },
    { 0, [] { set((MOST + "y").c_str(), (MOST + "y").c_str()), std::abort(); }, MOST + "abort" + MOST + "\n" },
#if !defined(_WIN32)  // Wine reserves no stack for handlers, and not every CPU has an instruction for each fault
    { SIGSEGV, [] { volatile int first = 0; overflow(&first); }, FAULT },
    { SIGBUS, [] { raise(SIGBUS); }, "mine: bus error, for example because a file became shorter while it was in use; kept\n" },
    { SIGFPE, [] { raise(SIGFPE); }, "mine: arithmetic error; kept\n" },
    { SIGILL, [] { raise(SIGILL); }, "mine: illegal instruction; kept\n" },
#endif
};

// Runs case i in a child process. i = number of cases: aborts, with a handler that was set before kvedge's.
void work(size_t i) {
    if (i == std::size(CASES)) {
        signal(SIGABRT, [](int) { std::_Exit(42); });
    }
    set();
    (i < std::size(CASES) ? CASES[i].work : std::abort)();
}

std::string all_of(FILE * from) {
    std::string said;
    for (int c; (c = std::fgetc(from)) != EOF;) {
        said += (char) c;
    }
    return said;
}

// Runs this program as a child for case i. Returns its stderr, and sets its exit code.
#if defined(_WIN32)
std::string run(const char * program, size_t i, int & code) {
    FILE *            child = _popen((std::string(program) + " " + std::to_string(i) + " 2>&1").c_str(), "rb");
    const std::string said  = all_of(child);
    code                    = _pclose(child);
    return said;
}
bool is_free(int) { return true; }
#else
std::string run(const char *, size_t i, int & code) {
    int ends[2], status = 0;
    CHECK(pipe(ends) == 0);
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        work(i);
        _exit(0);
    }
    close(ends[1]);
    FILE *            from = fdopen(ends[0], "r");
    const std::string said = all_of(from);
    fclose(from);
    CHECK(waitpid(child, &status, 0) == child);
    code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return said;
}
bool is_free(int number) {
    struct sigaction now {};
    return number == 0 || (sigaction(number, nullptr, &now) == 0 && !(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_DFL);
}
#endif

}  // namespace

int main(int argc, char ** argv) {
    if (argc > 1) {
        work((size_t) std::atoi(argv[1]));
        return 0;
    }
    kvedge_error err{};
    CHECK(kvedge_last_words("a", nullptr, 1, &err) == KVEDGE_E_ARGUMENT && strstr(err.message, "after"));
    CHECK(kvedge_last_words("a", "b", 0, &err) == KVEDGE_E_ARGUMENT && strstr(err.message, "exit_code"));
    int code = 0;
    for (const Case & one : CASES) {
        const std::string said = is_free(one.number) ? run(argv[0], (size_t) (&one - CASES), code) : "";
        if (is_free(one.number) && (said != one.said || code != 7)) {
            std::fprintf(stderr, "exit code %d; it said: %s in place of %s\n", code, said.c_str(), one.said.c_str());
            failures()++;
        }
    }
    CHECK(run(argv[0], std::size(CASES), code).empty() && code == 42);
    return failures() != 0;
}
