// SPDX-License-Identifier: Apache-2.0
//
// The CUDA driver as one table of functions. `load_driver` fills it from libcuda at run time; tests fill one with theirs.
// Whoever holds a table calls through it and nothing else of the driver. A table is constant once made and lives as long as
// the process; any thread.
#pragma once

#include <cuda.h>

#include <array>
#include <string>
#include <string_view>

#include "metrale/result.h"

namespace metrale::cuda {

/// The oldest driver, as cuDriverGetVersion counts: the first with cuFuncGetParamInfo.
inline constexpr int kMinimumDriver = 12040;

// X(function, version): the entry point as of that version of CUDA. The names of cuda.h may stand for later forms (cuMemAlloc is
// cuMemAlloc_v2), so the type and the version belong together.
#define METRALE_CUDA_REQUIRED(X)              \
  X(cuGetErrorName, 6000)                     \
  X(cuGetErrorString, 6000)                   \
  X(cuInit, 2000)                             \
  X(cuDriverGetVersion, 2020)                 \
  X(cuDeviceGetCount, 2000)                   \
  X(cuDeviceGet, 2000)                        \
  X(cuDeviceGetName, 2000)                    \
  X(cuDeviceGetAttribute, 2000)               \
  X(cuDeviceGetUuid, 11040)                   \
  X(cuDeviceCanAccessPeer, 4000)              \
  X(cuDevicePrimaryCtxRetain, 7000)           \
  X(cuDevicePrimaryCtxRelease, 11000)         \
  X(cuCtxGetCurrent, 4000)                    \
  X(cuCtxSetCurrent, 4000)                    \
  X(cuCtxSynchronize, 2000)                   \
  X(cuCtxEnablePeerAccess, 4000)              \
  X(cuCtxGetStreamPriorityRange, 5050)        \
  X(cuMemGetInfo, 3020)                       \
  X(cuMemAlloc, 3020)                         \
  X(cuMemAllocManaged, 6000)                  \
  X(cuMemFree, 3020)                          \
  X(cuMemHostAlloc, 2020)                     \
  X(cuMemFreeHost, 2000)                      \
  X(cuMemHostRegister, 6050)                  \
  X(cuMemHostUnregister, 4000)                \
  X(cuMemHostGetDevicePointer, 3020)          \
  X(cuMemcpyHtoDAsync, 3020)                  \
  X(cuMemcpyDtoHAsync, 3020)                  \
  X(cuMemcpyDtoDAsync, 3020)                  \
  X(cuMemcpy2DAsync, 3020)                    \
  X(cuMemcpyPeerAsync, 4000)                  \
  X(cuMemsetD8Async, 3020)                    \
  X(cuStreamCreateWithPriority, 5050)         \
  X(cuStreamDestroy, 4000)                    \
  X(cuStreamSynchronize, 2000)                \
  X(cuStreamQuery, 2000)                      \
  X(cuStreamWaitEvent, 3020)                  \
  X(cuStreamGetCtx, 9020)                     \
  X(cuStreamBeginCapture, 10010)              \
  X(cuStreamEndCapture, 10000)                \
  X(cuStreamGetCaptureInfo, 12030)            \
  X(cuStreamIsCapturing, 10000)               \
  X(cuThreadExchangeStreamCaptureMode, 10010) \
  X(cuLaunchHostFunc, 10000)                  \
  X(cuEventCreate, 2000)                      \
  X(cuEventDestroy, 4000)                     \
  X(cuEventRecord, 2000)                      \
  X(cuEventQuery, 2000)                       \
  X(cuEventSynchronize, 2000)                 \
  X(cuEventElapsedTime, 2000)                 \
  X(cuGraphInstantiateWithFlags, 11040)       \
  X(cuGraphUpload, 11010)                     \
  X(cuGraphLaunch, 10000)                     \
  X(cuGraphDestroy, 10000)                    \
  X(cuGraphExecDestroy, 10000)                \
  X(cuGraphGetNodes, 10000)                   \
  X(cuGraphNodeGetType, 10000)                \
  X(cuGraphKernelNodeGetParams, 12000)        \
  X(cuGraphChildGraphNodeGetGraph, 10000)     \
  X(cuGraphRetainUserObject, 11030)           \
  X(cuUserObjectCreate, 11030)                \
  X(cuUserObjectRelease, 11030)               \
  X(cuModuleLoadDataEx, 2010)                 \
  X(cuModuleUnload, 2000)                     \
  X(cuModuleGetFunction, 2000)                \
  X(cuModuleGetGlobal, 3020)                  \
  X(cuModuleGetFunctionCount, 12040)          \
  X(cuModuleEnumerateFunctions, 12040)        \
  X(cuFuncGetName, 12030)                     \
  X(cuFuncGetAttribute, 2020)                 \
  X(cuFuncSetAttribute, 9000)                 \
  X(cuFuncGetParamInfo, 12040)                \
  X(cuFuncLoad, 12040)                        \
  X(cuLaunchKernel, 4000)                     \
  X(cuLaunchKernelEx, 11060)

// Null where the driver lacks them.
#define METRALE_CUDA_OPTIONAL(X)      \
  X(cuMemcpyBatchAsync, 13000)        \
  X(cuMemAllocAsync, 11020)           \
  X(cuMemFreeAsync, 11020)            \
  X(cuDeviceGetDefaultMemPool, 11020) \
  X(cuMemPoolSetAttribute, 11020)     \
  X(cuTensorMapEncodeTiled, 12000)    \
  X(cuLogsRegisterCallback, 12090)    \
  X(cuKernelGetParamInfo, 12040)

struct Driver {
  // decltype of the name as cuda.h maps it, e.g. of cuMemAlloc_v2 for cuMemAlloc.
#define METRALE_CUDA_FIELD(name, version) decltype(&::name) name##_ = nullptr;
  METRALE_CUDA_REQUIRED(METRALE_CUDA_FIELD)
  METRALE_CUDA_OPTIONAL(METRALE_CUDA_FIELD)
#undef METRALE_CUDA_FIELD
  int version = 0;  ///< As cuDriverGetVersion counts, e.g. 13000.
};

/// Each name under which the driver is looked for, the first that loads wins.
inline constexpr std::array<const char*, 2> kDriverNames{"libcuda.so.1", "libcuda.so"};

/// The process's driver, initialised; the first call loads it, and a failure is the answer to every later call too.
/// Errors: unsupported (each name tried with the loader's words; an entry point is missing; too old; no device).
Result<const Driver*> load_driver();

/// "8a3f0c1e-…": a device's number as NVIDIA's own tools write it behind their "GPU-".
std::string uuid_text(const CUuuid& uuid);

}  // namespace metrale::cuda
