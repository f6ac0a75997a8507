// SPDX-License-Identifier: Apache-2.0
//
// The primary context of one device, retained while anybody here uses it, and what all backends of the device share: their streams,
// their spare blocks and whether the context is lost. Any thread.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>

#include "backends/cuda/driver.h"
#include "backends/cuda/outside_capture.h"
#include "backends/cuda/spare_blocks.h"
#include "backends/cuda/status.h"
#include "backends/cuda/work.h"
#include "metrale/result.h"

namespace metrale::cuda {

class Context {
 public:
  /// The context of a device, retained; the same object for as long as somebody holds it.
  /// Errors: invalid_argument (no such device: tells how many there are), and those of the driver.
  static Result<std::shared_ptr<Context>> of_device(const Driver& driver, int ordinal);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Driver& driver() const noexcept { return driver_; }
  CUdevice device() const noexcept { return device_; }
  CUcontext handle() const noexcept { return handle_; }
  /// Of this object among all of the process; never 0.
  std::uint64_t id() const noexcept { return id_; }
  Work& work() noexcept { return work_; }
  /// Of all backends of the device, so that none runs out of memory that another keeps spare.
  SpareBlocks& spares() noexcept { return spares_; }

  /// Makes the context current in this thread, and leaves it so. Asks the driver each time: another library of the process may have
  /// made its own current since.
  Result<> make_current() {
    CUcontext current = nullptr;
    if (driver_.cuCtxGetCurrent_(&current) == CUDA_SUCCESS && current == handle_) [[likely]]
      return {};
    return check(driver_.cuCtxSetCurrent_(handle_), "cuCtxSetCurrent");
  }

  /// Makes a call whose stream carries the context, so that it fails and is made again where another one is current. Asking which
  /// is current would cost every launch what only the first of a thread needs.
  template <class Call>
  CUresult on_stream(Call&& call) {
    if (bound_to_ != id_ && driver_.cuCtxSetCurrent_(handle_) == CUDA_SUCCESS) [[unlikely]]
      bound_to_ = id_;
    const CUresult code = call();
    if (code != CUDA_ERROR_INVALID_CONTEXT && code != CUDA_ERROR_INVALID_HANDLE && code != CUDA_ERROR_CONTEXT_IS_DESTROYED)
        [[likely]]
      return code;
    CUcontext current = nullptr;
    if (driver_.cuCtxGetCurrent_(&current) == CUDA_SUCCESS && current == handle_) return code;
    return driver_.cuCtxSetCurrent_(handle_) == CUDA_SUCCESS ? call() : code;
  }

  Result<> check(CUresult code, std::string_view what) {
    if (code == CUDA_SUCCESS) [[likely]]
      return {};
    return error(code, what);
  }
  /// The error of a failed call; a fatal one marks the context as lost and names the kernels that may have done it.
  Error error(CUresult code, std::string_view what);
  /// For what gives back: that the driver has gone already is no failure.
  Result<> check_release(CUresult code, std::string_view what) { return is_gone(code) ? Result<>() : check(code, what); }

  /// An error of the shared parts; a fatal one marks the context as lost.
  Error noted(Error error) noexcept {
    if (error.code() == Errc::device_lost) is_lost_.store(true, std::memory_order_release);
    return error;
  }

  /// A fatal fault was seen: calls into the driver would fail or hang.
  bool is_lost() const noexcept { return is_lost_.load(std::memory_order_acquire); }

  /// A device attribute; 0 where the driver does not know it.
  int attribute(CUdevice_attribute attribute) const noexcept;

 private:
  Context(const Driver& driver, CUdevice device, CUcontext handle);

  static inline thread_local std::uint64_t bound_to_ = 0;  ///< The context that `on_stream` made current last.

  const Driver& driver_;
  const CUdevice device_;
  const CUcontext handle_;
  const std::uint64_t id_;
  const unsigned created_at_fork_;
  std::atomic<bool> is_lost_{false};
  Work work_;
  SpareBlocks spares_;
};

}  // namespace metrale::cuda
