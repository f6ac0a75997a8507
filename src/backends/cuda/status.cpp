// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/status.h"

#include <fmt/format.h>

#include <string>

#include "backends/cuda/driver_log.h"

namespace metrale::cuda {

namespace {

Errc errc_of(CUresult code) noexcept {
  if (is_sticky(code) || is_gone(code)) return Errc::device_lost;
  switch (code) {
    case CUDA_ERROR_OUT_OF_MEMORY: return Errc::out_of_memory;
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_INVALID_CONTEXT:
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_ILLEGAL_STATE:
    case CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES:
    case CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE:
    case CUDA_ERROR_INVALID_CLUSTER_SIZE:
    case CUDA_ERROR_INVALID_RESOURCE_TYPE:
    case CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION:
    case CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
    case CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED:
    case CUDA_ERROR_PEER_ACCESS_NOT_ENABLED:
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
    case CUDA_ERROR_STREAM_CAPTURE_MERGE:
    case CUDA_ERROR_STREAM_CAPTURE_UNMATCHED:
    case CUDA_ERROR_STREAM_CAPTURE_UNJOINED:
    case CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD: return Errc::invalid_argument;
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_ISOLATION:
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
    case CUDA_ERROR_CAPTURED_EVENT: return Errc::capture_unsafe;
    case CUDA_ERROR_NOT_FOUND:
    case CUDA_ERROR_FUNCTION_NOT_LOADED: return Errc::not_found;
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_INVALID_PTX:
    case CUDA_ERROR_INVALID_SOURCE:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
    case CUDA_ERROR_JIT_COMPILATION_DISABLED: return Errc::bad_format;
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_NOT_INITIALIZED:
    case CUDA_ERROR_STUB_LIBRARY:
    case CUDA_ERROR_DEVICE_NOT_LICENSED:
    case CUDA_ERROR_SYSTEM_NOT_READY:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
    case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
    case CUDA_ERROR_TOO_MANY_PEERS: return Errc::unsupported;
    case CUDA_ERROR_NOT_READY:
    case CUDA_ERROR_DEVICE_UNAVAILABLE: return Errc::busy;
    case CUDA_ERROR_TIMEOUT: return Errc::timeout;
    case CUDA_ERROR_OPERATING_SYSTEM:
    case CUDA_ERROR_FILE_NOT_FOUND: return Errc::io;
    default: return Errc::internal;
  }
}

}  // namespace

bool is_sticky(CUresult code) noexcept {
  switch (code) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_TENSOR_MEMORY_LEAK:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:
    case CUDA_ERROR_EXTERNAL_DEVICE: return true;
    default: return false;
  }
}

bool is_gone(CUresult code) noexcept { return code == CUDA_ERROR_DEINITIALIZED || code == CUDA_ERROR_CONTEXT_IS_DESTROYED; }

Error driver_error(const Driver& driver, CUresult code, std::string_view what) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.cuGetErrorName_ == nullptr || driver.cuGetErrorName_(code, &name) != CUDA_SUCCESS || name == nullptr) {
    name = "unknown error";
  }
  if (driver.cuGetErrorString_ == nullptr || driver.cuGetErrorString_(code, &text) != CUDA_SUCCESS || text == nullptr) text = name;
  Error error = Error(errc_of(code), fmt::format("{}: {}", what, text)).with_native(code, name);
  if (is_sticky(code)) {
    if (std::string lines = last_log_lines(); !lines.empty()) error = std::move(error).with_note("the driver's log: " + lines);
  }
  return error;
}

}  // namespace metrale::cuda
