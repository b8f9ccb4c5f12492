// Pruning before the prompt: which rows of an image a model reads.

#include "system/error.h"
#include "plan/plan.h"
#include "system/structs.h"
#include "system/threads.h"
#include "kvedge.h"

#include <algorithm>
#include <cmath>

using namespace kvedge;

namespace {

kvedge_status check(const kvedge_image & image, kvedge_error * err) {
    if (!image.rows || image.n_rows < 1 || image.width < 1) {
        return fail(err, KVEDGE_E_ARGUMENT, "an image needs at least 1 row of at least 1 number; set rows, n_rows and width");
    }
    const bool placed = image.down != 0 || image.across != 0;
    if (placed && (image.down < 1 || image.across < 1 || (int64_t) image.down * image.across != image.n_rows)) {
        return fail(err, KVEDGE_E_ARGUMENT, "an image of %d rows does not fit a grid of %d x %d; set down and across so that their product "
                    "is the number of rows", image.n_rows, image.down, image.across);
    }
    return ok(err);
}

}  // namespace

extern "C" int32_t kvedge_plan_image_tokens(const kvedge_plan * plan, int32_t n_rows) try {
    if (!plan || n_rows <= 0) {
        return 0;
    }
    if (plan->pruner == find_pruner("none")) {
        return n_rows;  // under every image_tokens: pruner none chooses nothing
    }
    const int32_t asked = plan->image_ratio > 0.0 ? (int32_t) std::floor(plan->image_ratio * n_rows + 1e-9) : plan->image_tokens;
    return std::clamp(asked, 1, n_rows);
} catch (...) {
    return 0;
}

extern "C" kvedge_status kvedge_prune(
    const kvedge_plan * plan, const kvedge_image * given, int32_t n_threads, int32_t * kept, float * rows, int32_t * n,
    kvedge_error * err) try {
    kvedge_image image{};
    if (!plan || !given || !kept || !n) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_prune: plan, image, kept or n is NULL");
    }
    if (!read_struct(given, image)) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_prune: struct_size of the image is not set, or the image is of a newer kvedge.h");
    }
    if (const auto status = check(image, err); status != KVEDGE_OK) {
        return status;
    }
    const int32_t keep = kvedge_plan_image_tokens(plan, image.n_rows);
    if (*n < keep) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_prune: the output has room for %d rows, but the plan keeps %d; "
                    "kvedge_plan_image_tokens() returns the necessary size", *n, keep);
    }
    const bool           placed  = image.down > 0;
    const ImageRows      view    = { image.rows, image.n_rows, image.width, placed ? image.down : 1, placed ? image.across : image.n_rows };
    const int32_t        threads = n_threads > 0 ? n_threads : available_threads();
    const double *       params  = plan->params[KVEDGE_STAGE_PRUNER];
    std::vector<int32_t> found;
    plan->pruner->prune(view, keep, params, threads, found);
    for (size_t i = 0; rows && i < found.size(); i++) {
        std::copy_n(image.rows + (size_t) found[i] * (size_t) image.width, image.width, rows + i * (size_t) image.width);
    }
    std::copy(found.begin(), found.end(), kept);
    *n = (int32_t) found.size();
    return ok(err);
} catch (...) {
    return caught(err, "prune an image");
}
