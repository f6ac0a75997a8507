// SPDX-License-Identifier: Apache-2.0
//
// The instances of this build, in the order in which one is looked for: from the fastest variant to the most general.
#include "bridges/flashinfer/kernels.h"

namespace metrale::fi {

#include "flashinfer_instances.inc"

std::span<const DecodeInstance* const> decode_instances() noexcept { return kDecodeInstances; }
std::span<const PrefillInstance* const> prefill_instances() noexcept { return kPrefillInstances; }

}  // namespace metrale::fi
