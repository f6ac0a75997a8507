// SPDX-License-Identifier: Apache-2.0
#define METRALE_ISA avx512
#include "decoder/decoder.h"
#include "decoder/ops.h"
#include "decoder/simd.h"
// Order matters: each uses what comes before.
#include "decoder/attention.inl"
#include "decoder/recurrence.inl"
#include "decoder/rows.inl"

namespace metrale::host::decoder {

const Ops kOpsAvx512 = {avx512::rotate_store, avx512::attend, avx512::attend_one, avx512::conv,
                        avx512::delta,        avx512::argmax, avx512::row_facts};

}  // namespace metrale::host::decoder
