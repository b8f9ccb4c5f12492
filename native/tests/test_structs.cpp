// Structs with struct_size between programs and libraries with different headers, and the conversion of exceptions to statuses.

#include "check.h"
#include "system/error.h"
#include "system/structs.h"

#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

using namespace kvedge;

namespace {

constexpr kvedge_options DEFAULTS = { sizeof(kvedge_options), KVEDGE_TYPE_F16, 3, true, KVEDGE_TYPE_SAME, KVEDGE_TYPE_SAME, 7,
                                      KVEDGE_DEVICES_AUTO, KVEDGE_ROTATE_AUTO };

// kvedge_options as a program with newer headers has it.
struct Newer {
    kvedge_options known;
    int64_t        more;
};

void what_the_library_reads() {
    Newer            newer{ DEFAULTS, 0 };
    kvedge_options & given = newer.known;
    kvedge_options   own   = DEFAULTS;
    given.n_threads        = 9;
    given.unused           = 11;
    CHECK(read_struct(&given, own) && own.n_threads == 9 && own.struct_size == sizeof(own));

    // an older program's struct lacks the last field, which keeps its default
    own               = DEFAULTS;
    given.struct_size = FirstSize<kvedge_options>::value;
    CHECK(given.struct_size < sizeof(given));
    CHECK(read_struct(&given, own) && own.n_threads == 9 && own.unused == 7);

    // a newer program's struct has more bytes, which must be 0
    given.struct_size = sizeof(newer);
    own               = DEFAULTS;
    CHECK(read_struct(&given, own) && own.n_threads == 9 && own.struct_size == sizeof(own));
    newer.more = 1;
    own        = DEFAULTS;
    CHECK(!read_struct(&given, own) && own.n_threads == 3);

    for (size_t size : { (size_t) 0, sizeof(size_t), FirstSize<kvedge_options>::value - 1 }) {
        given.struct_size = size;
        CHECK(!read_struct(&given, own) && own.n_threads == 3);
    }
    CHECK(!read_struct((const kvedge_options *) nullptr, own));
}

void what_the_library_fills() {
    Newer newer;
    memset((void *) &newer, 0x5a, sizeof(newer));
    CHECK(write_struct(DEFAULTS, &newer.known, sizeof(newer)) && newer.more == 0 && newer.known.n_threads == 3);
    CHECK(newer.known.struct_size == sizeof(newer));

    // the library writes nothing beyond the program's struct_size
    memset((void *) &newer, 0x5a, sizeof(newer));
    CHECK(write_struct(DEFAULTS, &newer.known, FirstSize<kvedge_options>::value));
    CHECK(newer.known.unused == 0x5a5a5a5a && newer.known.n_threads == 3);

    memset((void *) &newer, 0x5a, sizeof(newer));
    CHECK(!write_struct(DEFAULTS, &newer.known, 8) && newer.known.n_threads == 0x5a5a5a5a);
    CHECK(!write_struct(DEFAULTS, (kvedge_options *) nullptr, sizeof(newer)));
}

template <class F> kvedge_status status_of(const F & action, std::string & message) {
    kvedge_error err{};
    try {
        action();
    } catch (...) {
        const kvedge_status status = caught(&err, "do it");
        CHECK(status == err.status);
    }
    message = err.message;
    return err.status;
}

void exceptions() {
    std::string said;
    CHECK(status_of([] { throw std::bad_alloc(); }, said) == KVEDGE_E_MEMORY && said == "no memory to do it");
    CHECK(status_of([] { std::vector<int>().reserve((size_t) -1); }, said) == KVEDGE_E_MEMORY);
    CHECK(status_of([] { throw std::runtime_error("the reason"); }, said) == KVEDGE_E_STATE && said == "failed to do it: the reason");
    CHECK(status_of([] { throw 5; }, said) == KVEDGE_E_STATE && said == "failed to do it");
    CHECK(status_of([] {}, said) == KVEDGE_OK);
}

}  // namespace

int main() {
    what_the_library_reads();
    what_the_library_fills();
    exceptions();
    return failures() == 0 ? 0 : 1;
}
