// Generated tokens are added, and nothing is removed (LOOK-M, and H2O in LOOK-M's comparison).

#include "plan/stages.h"

namespace kvedge {

extern const DecodePolicy decode_keep_all = { { "keep-all", nullptr }, false, nullptr };

}  // namespace kvedge
