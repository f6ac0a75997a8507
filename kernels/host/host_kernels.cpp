// SPDX-License-Identifier: Apache-2.0
#include "metrale/backends/host_kernels.h"

#include "decoder/decoder.h"
#include "matmul/matmul.h"
#include "metrale/switches.h"
#include "sampling/sampling.h"

namespace metrale::host {
namespace {

matmul::Isa isa() {
  matmul::Isa limit = matmul::Isa::amx;
  for (const auto candidate : {matmul::Isa::generic, matmul::Isa::avx2, matmul::Isa::avx512}) {
    if (switches().host_isa == matmul::to_string(candidate)) limit = candidate;
  }
  return matmul::select_isa(limit);
}

}  // namespace

std::vector<std::span<const HostKernel>> kernel_tables() {
  return {matmul::kernels(isa()), decoder::kernels(isa()), sampling::kernels()};
}

std::string_view kernel_isa() { return matmul::to_string(isa()); }

}  // namespace metrale::host
