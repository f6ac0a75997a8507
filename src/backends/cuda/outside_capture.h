// SPDX-License-Identifier: Apache-2.0
//
// OutsideCapture: calls about other streams on a thread that holds a capture. A value on the stack; the thread that made it.
#pragma once

#include <cuda.h>

#include "backends/cuda/driver.h"

namespace metrale::cuda {

/// While it lives, calls that a capture on this thread would forbid are allowed: they are about other streams. Costs nothing on a
/// thread without a capture of ours.
class OutsideCapture {
 public:
  explicit OutsideCapture(const Driver& driver) noexcept : driver_(driver) {
    if (num_on_thread() == 0) [[likely]]
      return;
    mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
    is_changed_ = driver_.cuThreadExchangeStreamCaptureMode_(&mode_) == CUDA_SUCCESS;
  }
  ~OutsideCapture() {
    if (is_changed_) static_cast<void>(driver_.cuThreadExchangeStreamCaptureMode_(&mode_));
  }
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

  /// Captures that this thread has begun and not ended.
  static int& num_on_thread() noexcept;

 private:
  const Driver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool is_changed_ = false;
};

}  // namespace metrale::cuda
