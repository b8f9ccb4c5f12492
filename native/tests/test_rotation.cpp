// Rotated rows, for every kernel table and every type that can be rotated.

#include "kernels/kernels.h"
#include "kernels/quantise.h"
#include "check.h"

#include <random>
#include <vector>

using namespace kvedge;

static std::mt19937 rng(13);

static std::vector<float> random_floats(size_t n) {
    std::normal_distribution<float> normal(0.0f, 2.0f);
    std::vector<float>              x(n);
    for (auto & v : x) {
        v = normal(rng);
    }
    return x;
}

// Checks that all tables rotate to the same bits, that two rotations give the row again, and that rotated rows are read back unrotated.
static void test_rotation(const Kernels & kn, Type type, int32_t d, int32_t block) {
    const int32_t n  = 5;
    const auto    x  = random_floats((size_t) (n * d));
    auto          turned = x, generic = x;
    kn.rotate({ turned.data(), (size_t) d }, n, d, block);
    kernels_generic()->rotate({ generic.data(), (size_t) d }, n, d, block);
    CHECK(turned == generic);
    CHECK(rotation(type, d) == block);
    std::vector<uint8_t> data((size_t) n * row_bytes(type, d)), plain = data;
    for (int32_t r = 0; r < n; r++) {
        quantise_row(type, x.data() + r * d, d, data.data() + (size_t) r * row_bytes(type, d));
        quantise_row(unrotated(type), turned.data() + r * d, d, plain.data() + (size_t) r * row_bytes(type, d));
    }
    CHECK(data == plain);
    std::vector<float> wide((size_t) (n * d)), codes = wide;
    kn.widen({ data.data(), row_bytes(type, d), type }, n, d, wide.data(), (size_t) d);
    kn.widen({ data.data(), row_bytes(type, d), unrotated(type) }, n, d, codes.data(), (size_t) d);
    kn.rotate({ codes.data(), (size_t) d }, n, d, block);
    CHECK(wide == codes);
    auto twice = turned;
    kn.rotate({ twice.data(), (size_t) d }, n, d, block);
    for (size_t i = 0; i < x.size(); i++) {
        CHECK(std::fabs(twice[i] - x[i]) <= 1e-5);
    }
}

int main() {
    for (const Kernels * t : runnable_kernels()) {
        std::fprintf(stderr, "%s\n", t->name);
        for (Type type : { Type::q8_0, Type::q4_0, Type::tq3 }) {
            for (int32_t d : { 64, 128, 192, 256, 384, 512 }) {
                test_rotation(*t, rotated_values(type), d, 64);
                test_rotation(*t, rotated_keys(type), d, d % 3 ? d : d / 3);
            }
        }
    }
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
