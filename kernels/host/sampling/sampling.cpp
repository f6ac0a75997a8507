// SPDX-License-Identifier: Apache-2.0
#include "sampling/sampling.h"

#include <array>

#include "metrale/models/decoder_kernels.h"

namespace metrale::host::sampling {
namespace {

void advance(const BlockContext& c) {
  const auto p = c.arg<AdvanceParams>(4);
  const std::int32_t token = *c.ptr<const std::int32_t>(0);
  c.ptr<std::int32_t>(3)[p.index] = token;
  *c.ptr<std::int32_t>(2) = token < 0 ? 0 : token;
  ++c.ptr<StepHeader>(1)->position;
}

constexpr std::array<std::uint32_t, 5> kAdvance{8, 8, 8, 8, sizeof(AdvanceParams)};
constexpr std::array<HostKernel, 1> kKernels{{{kSamplingModule, "advance", advance, kAdvance, {}, false}}};

}  // namespace

std::span<const HostKernel> kernels() noexcept { return kKernels; }

}  // namespace metrale::host::sampling
