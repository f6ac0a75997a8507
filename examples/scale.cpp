// SPDX-License-Identifier: Apache-2.0
//
// First steps: a kernel of one's own on the host backend, launched over device memory.
#include <array>
#include <cstdio>
#include <span>

#include "metrale/backends/host.h"

using metrale::Dim3;
using metrale::KernelArg;
using metrale::Result;

namespace {

/// Multiplies each float by a factor; block i owns element i.
void scale_block(const metrale::host::BlockContext& block) { block.ptr<float>(0)[block.index.x] *= block.arg<float>(1); }

constexpr std::array<std::uint32_t, 2> kScaleParams{sizeof(std::uint64_t), sizeof(float)};
constexpr std::array<metrale::host::HostKernel, 1> kKernels{{{"demo", "scale", scale_block, kScaleParams, /*n_tile=*/{}}}};

Result<> scale_on_device(std::span<float> values, float factor) {
  metrale::host::Options options;
  options.kernels = {kKernels};
  auto backend = METRALE_TRY(metrale::host::create(options));
  const auto stream = backend->default_stream();

  const auto block = METRALE_TRY(backend->alloc(values.size_bytes()));
  METRALE_TRY(backend->copy_h2d(block, std::as_bytes(values)));

  const auto kernel = METRALE_TRY(backend->kernel("demo", "scale"));
  const std::array args{KernelArg::buffer(block), KernelArg::value(factor)};
  const Dim3 grid{static_cast<std::uint32_t>(values.size())};
  METRALE_TRY(backend->launch_typed(kernel, grid, Dim3{1}, 0, stream, args));

  METRALE_TRY(backend->copy_d2h_on_stream(std::as_writable_bytes(values), block, stream));
  return backend->free(block);
}

}  // namespace

int main() {
  std::array values{1.0F, 2.0F, 3.0F};
  if (auto done = scale_on_device(values, 14.0F); !done) {
    std::fprintf(stderr, "%s\n", done.error().to_string().c_str());
    return 1;
  }
  std::printf("%g %g %g\n", values[0], values[1], values[2]);
  return values[2] == 42.0F ? 0 : 1;
}
