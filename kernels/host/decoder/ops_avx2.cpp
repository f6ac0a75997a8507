// SPDX-License-Identifier: Apache-2.0
#define METRALE_ISA avx2
#include "decoder/decoder.h"
#include "decoder/ops.h"
#include "decoder/simd.h"
// Order matters: each uses what comes before.
#include "decoder/attention.inl"
#include "decoder/recurrence.inl"
#include "decoder/rows.inl"

namespace metrale::host::decoder {

const Ops kOpsAvx2 = {avx2::rotate_store, avx2::attend, avx2::attend_one, avx2::conv, avx2::delta, avx2::argmax, avx2::row_facts};

}  // namespace metrale::host::decoder
