// SPDX-License-Identifier: Apache-2.0
//
// Libraries that call themselves libcuda.so.1 and are not good enough, each in its own way, for tests of how the driver is found.
// METRALE_FAKE_LIBCUDA says which way: without_proc_address, too_old, incomplete, does_not_start, without_device.
#include <cuda.h>

#include <cstring>
#include <string_view>

namespace {

constexpr std::string_view kWay = METRALE_FAKE_LIBCUDA;

CUresult error_name(CUresult, const char** text) {
  *text = "CUDA_ERROR_FROM_A_TEST";
  return CUDA_SUCCESS;
}
CUresult error_text(CUresult, const char** text) {
  *text = "as the test has it";
  return CUDA_SUCCESS;
}
CUresult version(int* out) {
  *out = kWay == "too_old" ? 11080 : 13000;
  return CUDA_SUCCESS;
}
CUresult init(unsigned) { return kWay == "does_not_start" ? CUDA_ERROR_SYSTEM_DRIVER_MISMATCH : CUDA_SUCCESS; }
CUresult device_count(int* count) {
  *count = 0;
  return CUDA_SUCCESS;
}
CUresult anything() { return CUDA_ERROR_UNKNOWN; }

CUresult get_proc_address(const char* symbol, void** address, int, cuuint64_t, CUdriverProcAddressQueryResult* status) {
  const std::string_view name = symbol;
  *status = CU_GET_PROC_ADDRESS_SUCCESS;
  *address = reinterpret_cast<void*>(&anything);
  if (name == "cuGetErrorName") *address = reinterpret_cast<void*>(&error_name);
  if (name == "cuGetErrorString") *address = reinterpret_cast<void*>(&error_text);
  if (name == "cuDriverGetVersion") *address = reinterpret_cast<void*>(&version);
  if (name == "cuInit") *address = reinterpret_cast<void*>(&init);
  if (name == "cuDeviceGetCount") *address = reinterpret_cast<void*>(&device_count);
  if (kWay == "incomplete" && (name == "cuLaunchKernelEx" || name == "cuMemAlloc" || name == "cuMemcpyBatchAsync")) {
    *address = nullptr;
    *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return CUDA_SUCCESS;
}

}  // namespace

// The name that the loader of the driver looks for, as a symbol and not as the macro of cuda.h.
extern "C" CUresult CUDAAPI METRALE_FAKE_ENTRY(const char* symbol, void** address, int driver_version, cuuint64_t flags,
                                               CUdriverProcAddressQueryResult* status) {
  return get_proc_address(symbol, address, driver_version, flags, status);
}
