// kvedge-queries.h - what the library says of its stages, and of plans before anything runs. Included by kvedge.h, whose
// conventions hold.

#ifndef KVEDGE_QUERIES_H
#define KVEDGE_QUERIES_H

#include "kvedge-stages.h"

#ifdef __cplusplus
extern "C" {
#endif

// Setting i of a member of the library's, by its name, in the order in which it declares them: what kvedge_plan_set takes as "scorer.NAME".
// A setting whose choices are "true,false" is a switch. NULL past the end, or where there is no such member. Static storage.
//
//     for (int32_t i = 0; (s = kvedge_stage_setting(KVEDGE_STAGE_SCORER, "window", i)); i++) printf("%s: %s\n", s->name, s->help);
KVEDGE_API const kvedge_setting * kvedge_stage_setting(kvedge_stage stage, const char * member, int32_t i);

#ifdef __cplusplus
}
#endif

#endif  // KVEDGE_QUERIES_H
