// Fuzzes kvedge_prune: rows of an image, with a grid that fits or does not, and every pruner with its settings.

#include "fuzz/plans.h"

using namespace kvedge::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    Input        in(data, size);
    kvedge_image image{ sizeof(image), nullptr, in.between(0, 90), in.between(0, 40), in.between(0, 12), in.between(0, 12) };
    const bool   fits = (in.byte() & 1) != 0;  // else the grid may not fit the number of rows
    if (fits) {
        image.n_rows = image.down * image.across;
    }
    std::vector<float> rows((size_t) image.n_rows * (size_t) image.width);
    const uint8_t      period = in.byte();  // numbers from index 512 on repeat with period 512 + period
    for (size_t i = 0; i < rows.size(); i++) {
        rows[i] = i < 512 ? (float) (int8_t) in.byte() / 16.0f : rows[i % (512 + period)];
    }
    image.rows = rows.empty() ? nullptr : rows.data();
    const PlanHandle plan = new_plan();
    draw_plan(in, plan.get(), 1, 1, 1);

    const int32_t        most = kvedge_plan_image_tokens(plan.get(), image.n_rows);
    int32_t              n    = most - (in.byte() == 255);
    std::vector<int32_t> kept((size_t) std::max(n, 0));
    std::vector<float>   out(kept.size() * (size_t) image.width);
    kvedge_error         err{};
    const bool           wanted = (in.byte() & 1) == 0;
    if (checked_status(kvedge_prune(plan.get(), &image, 1, kept.data(), wanted ? out.data() : nullptr, &n, &err), err) == KVEDGE_OK) {
        REQUIRE(n >= 1 && n <= most);
        for (int32_t i = 0; i < n; i++) {
            REQUIRE(kept[(size_t) i] >= (i ? kept[(size_t) i - 1] + 1 : 0) && kept[(size_t) i] < image.n_rows);
        }
    }
    return 0;
}
