// kvedge-crash.h: child processes end in every way that it tells of, and what they wrote and left with is read.

#include "check.h"
#include "kvedge.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>

#include <signal.h>
#if defined(_WIN32)
#    define WIN32_LEAN_AND_MEAN
#    include <windows.h>
#else
#    include <sys/wait.h>
#    include <unistd.h>
#endif

namespace {

// What a child does. Each is a function without arguments: on Windows the child is this program again, given the name of one.

void set(const char * before = "mine: ", const char * after = "; kept") {
    kvedge_error err{};
    CHECK(kvedge_last_words(before, after, 7, &err) == KVEDGE_OK);
}

void in_a_thread(void (*work)()) { std::thread(work).join(); }

// Faults. On POSIX the signals alone: no sanitizer stops them before, and a processor need not have an instruction for each.
#if defined(_WIN32)
constexpr int ABORTED = 3, FAULTED = (int) EXCEPTION_ACCESS_VIOLATION, BUS_NUMBER = 0;

bool is_free(int) { return true; }

void reads_nowhere() {
    volatile int * volatile nowhere = (volatile int *) 8;
    (void) *nowhere;
}

void divides_by_zero() {
    volatile int number = 0;
    number              = 100 / number;
}

void runs_no_instruction() { __builtin_trap(); }

// Raised, because Windows lets nobody cut a file that is mapped: its disk or server would have to vanish.
void loses_a_page() { RaiseException(EXCEPTION_IN_PAGE_ERROR, 0, 0, nullptr); }

// Wine commits a stack whole, with one guard page at its far end; Windows has it in front of what is kept back for handlers.
void prepare_overflow() {
    MEMORY_BASIC_INFORMATION here{};
    DWORD                    before = 0;
    ULONG                    kept   = 0;
    CHECK(SetThreadStackGuarantee(&kept) && kept >= 64 << 10);
    if (GetProcAddress(GetModuleHandleW(L"ntdll.dll"), "wine_get_version")) {
        CHECK(VirtualQuery(&here, &here, sizeof(here)) == sizeof(here));
        CHECK(VirtualProtect((char *) here.AllocationBase + (128 << 10), 4096, PAGE_READWRITE | PAGE_GUARD, &before));
    }
}
#else
constexpr int ABORTED = 128 + SIGABRT, FAULTED = 128 + SIGSEGV, BUS_NUMBER = SIGBUS;

// A sanitizer has handlers of its own, which stay.
bool is_free(int number) {
    struct sigaction now {};
    return sigaction(number, nullptr, &now) == 0 && !(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_DFL;
}

void reads_nowhere() { raise(SIGSEGV); }
void divides_by_zero() { raise(SIGFPE); }
void runs_no_instruction() { raise(SIGILL); }
void loses_a_page() { raise(SIGBUS); }
void prepare_overflow() {}
#endif

void segv() { set(), reads_nowhere(); }
void segv_elsewhere() { set(), in_a_thread(reads_nowhere); }
void fpe() { set(), divides_by_zero(); }
void ill() { set(), runs_no_instruction(); }
void bus() { set(), loses_a_page(); }
void aborts() { set(), std::abort(); }
void raises_abort() { set(), raise(SIGABRT); }

void throws() { throw std::runtime_error("no such luck"); }
void throws_here() { set(), throws(); }
void throws_elsewhere() { set(), in_a_thread(throws); }
void throws_a_number() {
    set();
    in_a_thread([] { throw 3; });
}
void catches() {
    set();
    in_a_thread([] {
        try {
            throws();
        } catch (const std::exception &) {
        }
    });
}

int deeper(volatile int * above) {
    volatile int here[256] = { *above };
    return *above == 1 ? 0 : deeper(here) + here[0];
}
void overflows() {
    set();
    in_a_thread([] {
        set();
        prepare_overflow();
        volatile int first = 0;
        deeper(&first);
    });
}

void says_much_in_turn() {
    for (int i = 0; i < 9; i++) {
        set(("step " + std::to_string(i) + ": ").c_str(), ".");
    }
    std::abort();
}
void says_too_much() {
    const std::string endless(100000, 'x');
    set(endless.c_str(), endless.c_str());
    std::abort();
}

void in_many_threads(void (*work)()) {
    set();
    std::thread threads[8];
    for (auto & thread : threads) {
        thread = std::thread(work);
    }
    for (auto & thread : threads) {
        thread.join();
    }
}
void many_abort() { in_many_threads(std::abort); }
void many_fault() {
    static std::atomic<int> there{ 0 };
    in_many_threads([] {
        for (there++; there < 8;) {
            std::this_thread::yield();
        }
        reads_nowhere();
    });
}

void leave(int) { std::_Exit(42); }
void has_a_handler_of_aborts() { signal(SIGABRT, leave), aborts(); }
void has_a_handler_of_faults() { signal(SIGSEGV, leave), segv_elsewhere(); }
void takes_back() {
    set();
    CHECK(kvedge_last_words(nullptr, nullptr, 0, nullptr) == KVEDGE_OK);
    CHECK(kvedge_last_words(nullptr, nullptr, 0, nullptr) == KVEDGE_OK);
}
void takes_back_and_aborts() { takes_back(), std::abort(); }
void takes_back_and_faults() { takes_back(), reads_nowhere(); }
void sets_again() { takes_back(), segv(); }

#if defined(_WIN32)
LONG WINAPI older(EXCEPTION_POINTERS * failed) {
    if (failed->ExceptionRecord->ExceptionCode == EXCEPTION_ACCESS_VIOLATION) {
        leave(0);
    }
    return EXCEPTION_CONTINUE_SEARCH;
}
void has_a_filter() { SetUnhandledExceptionFilter(older), segv(); }
void has_a_filter_of_other_faults() { SetUnhandledExceptionFilter(older), fpe(); }
// As in a program of another compiler and in its threads, where nothing knows GCC's exceptions.
void throws_in_another_compilers_thread() {
    SetUnhandledExceptionFilter(nullptr);
    set();
    const auto work = [](void *) -> DWORD {
        throws();
        return 0;
    };
    WaitForSingleObject(CreateThread(nullptr, 0, work, nullptr, 0, nullptr), INFINITE);
}
void throws_as_microsoft_does() { set(), RaiseException(0xE06D7363, EXCEPTION_NONCONTINUABLE, 0, nullptr); }
void meets_a_breakpoint() { set(), RaiseException(EXCEPTION_BREAKPOINT, 0, 0, nullptr); }
#endif

struct Case {
    const char * name;
    void (*work)();
};
#define CASE(function) { #function, function }
const Case CASES[] = {
    CASE(segv), CASE(segv_elsewhere), CASE(fpe), CASE(ill), CASE(bus), CASE(aborts), CASE(raises_abort),
    CASE(throws_here), CASE(throws_elsewhere), CASE(throws_a_number), CASE(catches), CASE(overflows),
    CASE(says_much_in_turn), CASE(says_too_much), CASE(many_abort), CASE(many_fault),
    CASE(has_a_handler_of_aborts), CASE(has_a_handler_of_faults),
    CASE(takes_back_and_aborts), CASE(takes_back_and_faults), CASE(sets_again),
#if defined(_WIN32)
    CASE(has_a_filter), CASE(has_a_filter_of_other_faults),
    CASE(throws_in_another_compilers_thread), CASE(throws_as_microsoft_does), CASE(meets_a_breakpoint),
#endif
};

void work(const char * name) {
    std::find_if(std::begin(CASES), std::end(CASES), [&](const Case & one) { return !strcmp(one.name, name); })->work();
}

struct Ended {
    std::string said;  // on stderr
    int         code;  // 128 and the signal, where one ended it
};

#if defined(_WIN32)

Ended run(const char * name) {
    SECURITY_ATTRIBUTES inherited{};
    inherited.nLength        = sizeof(inherited);
    inherited.bInheritHandle = TRUE;
    HANDLE ours = nullptr, theirs = nullptr;
    CHECK(CreatePipe(&ours, &theirs, &inherited, 0) && SetHandleInformation(ours, HANDLE_FLAG_INHERIT, 0));
    char program[MAX_PATH];
    CHECK(GetModuleFileNameA(nullptr, program, sizeof(program)) < sizeof(program));
    std::string  line = "test_crash " + std::string(name);
    STARTUPINFOA start{};
    start.cb         = sizeof(start);
    start.dwFlags    = STARTF_USESTDHANDLES;
    start.hStdInput  = GetStdHandle(STD_INPUT_HANDLE);
    start.hStdOutput = GetStdHandle(STD_OUTPUT_HANDLE);
    start.hStdError  = theirs;
    PROCESS_INFORMATION child{};
    CHECK(CreateProcessA(program, &line[0], nullptr, nullptr, TRUE, 0, nullptr, nullptr, &start, &child));
    CloseHandle(theirs);
    Ended out{};
    char  buffer[4096];
    DWORD n = 0;
    while (ReadFile(ours, buffer, sizeof(buffer), &n, nullptr) && n > 0) {
        out.said.append(buffer, n);
    }
    CloseHandle(ours);
    DWORD code = 0;
    CHECK(WaitForSingleObject(child.hProcess, INFINITE) == WAIT_OBJECT_0 && GetExitCodeProcess(child.hProcess, &code));
    CloseHandle(child.hThread);
    CloseHandle(child.hProcess);
    out.code = (int) code;
    return out;
}

#else

Ended run(const char * name) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        work(name);
        _exit(0);
    }
    close(ends[1]);
    Ended   out{};
    char    buffer[4096];
    ssize_t n;
    while ((n = read(ends[0], buffer, sizeof(buffer))) > 0) {
        out.said.append(buffer, (size_t) n);
    }
    close(ends[0]);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    out.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return out;
}

#endif

void expect(const char * name, const std::string & said, int code = 7) {
    const Ended ended = run(name);
    if (ended.said != said || ended.code != code) {
        std::fprintf(stderr, "%s: exit code %d, not %d; it said: %s\n", name, ended.code, code, ended.said.c_str());
        failures()++;
    }
}

void test_faults() {
    const struct {
        int          number;
        const char * name;
        const char * what;
    } faults[] = {
        { SIGSEGV, "segv", "segmentation fault" },
        { SIGSEGV, "segv_elsewhere", "segmentation fault" },
        { SIGSEGV, "overflows", "segmentation fault" },
        { BUS_NUMBER, "bus", "bus error, as of a file that became shorter while it was in use" },
        { SIGFPE, "fpe", "arithmetic error" },
        { SIGILL, "ill", "illegal instruction" },
        { SIGABRT, "raises_abort", "abort" },
    };
    for (const auto & one : faults) {
        if (is_free(one.number)) {
            expect(one.name, std::string("mine: ") + one.what + "; kept\n");
        }
    }
    expect("aborts", "mine: abort; kept\n");
}

void test_exceptions() {
    expect("throws_here", "mine: an exception that nobody caught: no such luck; kept\n");
    expect("throws_elsewhere", "mine: an exception that nobody caught: no such luck; kept\n");
    expect("throws_a_number", "mine: an exception that nobody caught; kept\n");
    expect("catches", "", 0);
}

void test_the_last_words_count() {
    expect("says_much_in_turn", "step 8: abort.\n");
    const std::string most(KVEDGE_LAST_WORDS, 'x');
    expect("says_too_much", most + "abort" + most + "\n");
}

void test_several_threads_write_one_line() {
    expect("many_abort", "mine: abort; kept\n");
    if (is_free(SIGSEGV)) {
        expect("many_fault", "mine: segmentation fault; kept\n");
    }
}

void test_what_was_there_stays() {
    expect("has_a_handler_of_aborts", "", 42);
    expect("has_a_handler_of_faults", "", 42);
}

void expect_nothing_of_ours(const char * name, int code) {
    const Ended ended = run(name);
    CHECK((ended.said.empty() || ended.said.rfind("qemu: ", 0) == 0) && ended.said.find("mine") == std::string::npos);
    CHECK(ended.code == code);
}

void test_all_is_given_back() {
    expect_nothing_of_ours("takes_back_and_aborts", ABORTED);
    if (is_free(SIGSEGV)) {
        expect_nothing_of_ours("takes_back_and_faults", FAULTED);
        expect("sets_again", "mine: segmentation fault; kept\n");
    }
}

#if defined(_WIN32)
void test_filters() {
    expect("has_a_filter", "", 42);
    expect("has_a_filter_of_other_faults", "mine: arithmetic error; kept\n");
    expect("throws_in_another_compilers_thread", "mine: an exception that nobody caught: no such luck; kept\n");
    expect("throws_as_microsoft_does", "mine: an exception that nobody caught; kept\n");
    expect("meets_a_breakpoint", "", (int) EXCEPTION_BREAKPOINT);
}
#endif

void test_arguments() {
    kvedge_error err{};
    CHECK(kvedge_last_words("a", nullptr, 1, &err) == KVEDGE_E_ARGUMENT && strstr(err.message, "after"));
    CHECK(kvedge_last_words("a", "b", 0, &err) == KVEDGE_E_ARGUMENT && strstr(err.message, "exit_code"));
    CHECK(kvedge_last_words("a", "b", 256, nullptr) == KVEDGE_E_ARGUMENT);
    CHECK(is_free(SIGABRT));
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc > 1) {
        work(argv[1]);
        return failures() != 0;
    }
    test_arguments();
    test_faults();
    test_exceptions();
    test_the_last_words_count();
    test_several_threads_write_one_line();
    test_what_was_there_stays();
    test_all_is_given_back();
#if defined(_WIN32)
    test_filters();
#endif
    return failures() != 0;
}
