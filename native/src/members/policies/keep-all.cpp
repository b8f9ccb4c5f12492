// Generated tokens are added, nothing is removed (LOOK-M, and H2O as its authors compare with it).

#include "plan/stages.h"

namespace kvedge {

extern const DecodePolicy decode_keep_all = { { "keep-all", nullptr }, false, nullptr };

}  // namespace kvedge
