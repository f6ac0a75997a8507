// SPDX-License-Identifier: Apache-2.0
//
// How the driver's result codes become errors: the only place that knows which Errc a CUresult is. Functions; any thread.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string_view>

#include "backends/cuda/driver.h"
#include "metrale/result.h"

namespace metrale::cuda {

/// The error for `code`, with the driver's number, name and text. `what`: the driver's function, "cuMemAlloc".
Error driver_error(const Driver& driver, CUresult code, std::string_view what);

/// Ok for CUDA_SUCCESS, otherwise `driver_error`.
inline Result<> check(const Driver& driver, CUresult code, std::string_view what) {
  if (code == CUDA_SUCCESS) [[likely]]
    return {};
  return driver_error(driver, code, what);
}

/// Whether the context cannot be used any more after `code`, whatever is called next.
bool is_sticky(CUresult code) noexcept;

/// Whether `code` only says that the driver or its context has gone already: no failure where memory and handles are given back.
bool is_gone(CUresult code) noexcept;

/// Of a size that no address space holds the driver says that the argument is wrong: the code of an allocation of `bytes`.
inline CUresult size_refusal(CUresult code, std::uint64_t bytes) noexcept {
  constexpr std::uint64_t kLargest = std::uint64_t{1} << 46;
  return code == CUDA_ERROR_INVALID_VALUE && bytes > kLargest ? CUDA_ERROR_OUT_OF_MEMORY : code;
}

/// Makes a call that gives back what nobody else knows of: once more where the driver, as a busy one may, refused. Answers what the
/// driver said first.
template <class Call>
CUresult give_back_insisting(Call&& call) {
  const CUresult code = call();
  if (code != CUDA_SUCCESS && !is_gone(code) && !is_sticky(code)) static_cast<void>(call());
  return code;
}

}  // namespace metrale::cuda
