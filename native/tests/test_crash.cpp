// kvedge-crash.h: child processes end in every way that it tells of, and what they wrote and left with is read.

#include "check.h"
#include "kvedge.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#if defined(_WIN32)

int main() {
    CHECK(kvedge_last_words("a", "b", 1, nullptr) == KVEDGE_E_UNSUPPORTED);
    return failures() != 0;
}

#else

#    include <signal.h>
#    include <sys/wait.h>
#    include <unistd.h>

namespace {

struct Ended {
    std::string said;
    int         code   = -1;
    int         signal = 0;
};

// Runs a function in a child, and tells what it wrote to stderr and how it ended.
Ended run(void (*work)()) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        work();
        _exit(0);
    }
    close(ends[1]);
    Ended   out;
    char    buffer[4096];
    ssize_t n;
    while ((n = read(ends[0], buffer, sizeof(buffer))) > 0) {
        out.said.append(buffer, (size_t) n);
    }
    close(ends[0]);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    (WIFEXITED(status) ? out.code : out.signal) = WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status);
    return out;
}

void set(const char * before = "mine: ", const char * after = "; kept") {
    kvedge_error err{};
    CHECK(kvedge_last_words(before, after, 7, &err) == KVEDGE_OK);
}

// A sanitizer has handlers of its own, which stay.
bool is_free(int number) {
    struct sigaction now {};
    return sigaction(number, nullptr, &now) == 0 && !(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_DFL;
}

void test_signals() {
    static int number;
    const struct {
        int          number;
        const char * what;
    } cases[] = {
        { SIGSEGV, "segmentation fault" },
        { SIGBUS, "bus error, as of a file that became shorter while it was in use" },
        { SIGFPE, "arithmetic error" },
        { SIGILL, "illegal instruction" },
        { SIGABRT, "abort" },
    };
    for (const auto & one : cases) {
        number = one.number;
        if (!is_free(number)) {
            continue;
        }
        const Ended ended = run([] {
            set();
            raise(number);
        });
        CHECK(ended.said == std::string("mine: ") + one.what + "; kept\n" && ended.code == 7);
    }
    const Ended ended = run([] {
        set();
        std::abort();
    });
    CHECK(ended.said == "mine: abort; kept\n" && ended.code == 7);
}

void test_exceptions() {
    Ended ended = run([] {
        set();
        std::thread([] { throw std::runtime_error("no such luck"); }).join();
    });
    CHECK(ended.said == "mine: an exception that nobody caught: no such luck; kept\n" && ended.code == 7);
    ended = run([] {
        set();
        std::thread([] { throw 3; }).join();
    });
    CHECK(ended.said == "mine: an exception that nobody caught; kept\n" && ended.code == 7);
}

int deeper(volatile int * above) {
    volatile int here[256] = { *above };
    return *above == 1 ? 0 : deeper(here) + here[0];
}

void test_a_stack_that_overflows() {
    if (!is_free(SIGSEGV)) {
        return;
    }
    const Ended ended = run([] {
        set();
        std::thread([] {
            set();
            volatile int first = 0;
            deeper(&first);
        }).join();
    });
    CHECK(ended.said == "mine: segmentation fault; kept\n" && ended.code == 7);
}

void test_the_last_words_count() {
    Ended ended = run([] {
        for (int i = 0; i < 9; i++) {
            set(("step " + std::to_string(i) + ": ").c_str(), ".");
        }
        std::abort();
    });
    CHECK(ended.said == "step 8: abort.\n" && ended.code == 7);
    ended = run([] {
        const std::string endless(100000, 'x');
        set(endless.c_str(), endless.c_str());
        std::abort();
    });
    const std::string most(KVEDGE_LAST_WORDS, 'x');
    CHECK(ended.said == most + "abort" + most + "\n" && ended.code == 7);
}

void test_several_threads_write_one_line() {
    const Ended ended = run([] {
        set();
        std::thread threads[8];
        for (auto & thread : threads) {
            thread = std::thread([] { std::abort(); });
        }
        for (auto & thread : threads) {
            thread.join();
        }
    });
    CHECK(ended.said == "mine: abort; kept\n" && ended.code == 7);
}

void test_what_was_there_stays() {
    Ended ended = run([] {
        signal(SIGABRT, [](int) { _exit(42); });
        set();
        std::abort();
    });
    CHECK(ended.said.empty() && ended.code == 42);
    ended = run([] {
        set();
        CHECK(kvedge_last_words(nullptr, nullptr, 0, nullptr) == KVEDGE_OK);
        CHECK(kvedge_last_words(nullptr, nullptr, 0, nullptr) == KVEDGE_OK);
        std::abort();
    });
    CHECK((ended.said.empty() || ended.said.rfind("qemu: ", 0) == 0) && ended.said.find("mine") == std::string::npos);
    CHECK(ended.signal == SIGABRT);
}

void test_arguments() {
    kvedge_error err{};
    CHECK(kvedge_last_words("a", nullptr, 1, &err) == KVEDGE_E_ARGUMENT && strstr(err.message, "after"));
    CHECK(kvedge_last_words("a", "b", 0, &err) == KVEDGE_E_ARGUMENT && strstr(err.message, "exit_code"));
    CHECK(kvedge_last_words("a", "b", 256, nullptr) == KVEDGE_E_ARGUMENT);
    CHECK(is_free(SIGABRT));
}

}  // namespace

int main() {
    test_arguments();
    test_signals();
    test_exceptions();
    test_a_stack_that_overflows();
    test_the_last_words_count();
    test_several_threads_write_one_line();
    test_what_was_there_stays();
    return failures() != 0;
}

#endif
