// SPDX-License-Identifier: Apache-2.0
//
// What the sources of the bridge share.
#pragma once

#include <memory>
#include <source_location>
#include <string_view>

#include "bridges/flashinfer/kernels.h"
#include "metrale/bridges/flashinfer.h"

namespace metrale::flashinfer {

/// FlashInfer's words and CUDA's codes as an Error; ok where the outcome is. The one translation of this bridge.
Result<> translate(const fi::Outcome& outcome, std::string_view what, std::source_location site);

/// The shapes are checked. Errors: unsupported (no instance for them).
Result<std::unique_ptr<AttentionPlan>> make_attention_plan(GpuBackend& backend, const fi::Device& device,
                                                           const AttentionShape& shape, const PlanOptions& options,
                                                           std::source_location site);

template <class T>
T* host_view(DevicePtr ptr) noexcept {
  return reinterpret_cast<T*>(ptr.address);
}

}  // namespace metrale::flashinfer
