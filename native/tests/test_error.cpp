// Error messages are formatted equally with every C library, and never exceed their buffer.

#include "check.h"
#include "system/error.h"

#include <cstring>
#include <string>

using namespace kvedge;

int main() {
    kvedge_error err{};
    const size_t large = (size_t) 5 << 40;
    CHECK(fail(&err, KVEDGE_E_ARGUMENT, "%zu of %d, %lld, %llu, %.1f, %s", large, 3, -7000000000LL, 7000000000ULL, 0.5, "ü") ==
          KVEDGE_E_ARGUMENT);
    CHECK(err.status == KVEDGE_E_ARGUMENT);
    CHECK(strcmp(err.message, "5497558138880 of 3, -7000000000, 7000000000, 0.5, ü") == 0);
    const std::string text(3 * sizeof(err.message), 'x');
    CHECK(fail(&err, KVEDGE_E_FILE, "%s", text.c_str()) == KVEDGE_E_FILE);
    CHECK(text.substr(0, sizeof(err.message) - 1) == err.message);
    CHECK(fail(&err, KVEDGE_E_UNKNOWN, "no '%s', '%s', '%s'", "a\nb\r", "\xFF\xC3(\xED\xA0\x80", "\U0001F4AC") == KVEDGE_E_UNKNOWN);
    CHECK(strcmp(err.message, "no 'a b ', '?\?(?\?\?', '\U0001F4AC'") == 0);
    const std::string before(sizeof(err.message) - 3, 'x');  // only two of the last character's three bytes fit
    CHECK(fail(&err, KVEDGE_E_FILE, "%s\u4F1A", before.c_str()) == KVEDGE_E_FILE && err.message == before + "??");
    CHECK(fail(nullptr, KVEDGE_E_FILE, "nobody asks") == KVEDGE_E_FILE);
    CHECK(ok(&err) == KVEDGE_OK && err.status == KVEDGE_OK && err.message[0] == '\0');
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
