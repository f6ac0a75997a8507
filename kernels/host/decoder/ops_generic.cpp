// SPDX-License-Identifier: Apache-2.0
#define METRALE_ISA generic
#include "decoder/decoder.h"
#include "decoder/ops.h"
#include "decoder/simd.h"
// Order matters: each uses what comes before.
#include "decoder/attention.inl"
#include "decoder/recurrence.inl"
#include "decoder/rows.inl"

namespace metrale::host::decoder {

const Ops kOpsGeneric = {generic::rotate_store, generic::attend, generic::attend_one, generic::conv,
                         generic::delta,        generic::argmax, generic::row_facts};

}  // namespace metrale::host::decoder
