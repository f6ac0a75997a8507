// SPDX-License-Identifier: Apache-2.0
//
// A fake GPU that claims to have the decoders' kernels: they compute nothing, and the largest logit is always the
// same.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "metrale/models/decoder_kernels.h"
#include "metrale/models/matmul_kernels.h"
#include "model_fixture.h"
#include "models/decoder/launch_plans.h"
#include "support/fake_cuda/fake_gpu.h"

namespace metrale::test {

/// No model ends its text with it.
inline constexpr std::int32_t kAnswer = 5;

inline void cuda_nothing(const host::BlockContext&) {}
inline void cuda_answer(const host::BlockContext& c) {
  const auto rows = c.arg<RowsParams>(2).rows;
  if (c.index.x == 0) std::fill_n(c.ptr<std::int32_t>(1), rows, kAnswer);
}

/// Twelve buffers and its parameters; the host has no such kernel.
inline constexpr std::array<std::uint32_t, 13> kRotateAttendBytes{8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, sizeof(RotateAttendParams)};

/// Adds the kernels that plans name beyond the common ones: "linear_f32_1" takes what "linear" takes.
template <class Plans>
void add_matmul_entries(const Plans& plans, std::vector<host::HostKernel>& all) {
  if constexpr (requires { plans.matmul_entries(); }) {
    for (const std::string_view entry : plans.matmul_entries()) {
      const std::string_view common = entry.substr(0, entry.find('_'));
      const auto like = std::find_if(all.begin(), all.end(), [&](const host::HostKernel& kernel) {
        return kernel.module == kMatmulModule && kernel.function == common;
      });
      if (like == all.end()) throw std::runtime_error("no kernel is like " + std::string(entry));
      host::HostKernel kernel = *like;
      kernel.function = entry;
      all.push_back(kernel);
    }
  }
}

/// One image for each module of the host's kernels, with their signatures.
inline std::vector<cuda::ModuleImage> cuda_decoder_modules(fake_cuda::FakeGpu& fake) {
  std::vector<host::HostKernel> all;
  for (const auto& table : host::kernel_tables()) all.insert(all.end(), table.begin(), table.end());
  all.push_back({kDecoderModule, "rotate_attend", cuda_nothing, kRotateAttendBytes, {}, false, false});
  add_matmul_entries(*models::cuda_plans(4), all);
  std::vector<cuda::ModuleImage> images;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].function != "advance") all[i].fn = all[i].function == "argmax" ? cuda_answer : cuda_nothing;
    all[i].waits_for_dependency = true;
  }
  std::vector<std::string_view> modules;
  for (const host::HostKernel& kernel : all) {
    if (std::find(modules.begin(), modules.end(), kernel.module) == modules.end()) modules.push_back(kernel.module);
  }
  for (const std::string_view module : modules) images.push_back(fake.add_module(module, all));
  return images;
}

}  // namespace metrale::test
