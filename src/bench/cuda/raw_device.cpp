// SPDX-License-Identifier: Apache-2.0
//
// Making and closing the raw side, launches and memory. Copies, graphs and marks are in raw_work.cpp.
#include "bench/cuda/raw_device.h"

#include <algorithm>
#include <array>
#include <chrono>

#include <fmt/format.h>

#include "backends/cuda/status.h"
#include "bench/suites.h"
#include "metrale/backends/cuda_kernels.h"

namespace metrale::bench {
namespace {

constexpr std::uint64_t kCounterBytes = 65'536;
constexpr unsigned kNopThreads = 32;

}  // namespace

Result<> CudaRawDevice::check(CUresult code, std::string_view what) const { return cuda::check(driver_, code, what); }

Result<> CudaRawDevice::enter() const { return check(driver_.cuCtxSetCurrent_(context_), "cuCtxSetCurrent"); }

Result<std::unique_ptr<CudaRawDevice>> CudaRawDevice::create(const cuda::Driver& driver, int ordinal,
                                                             std::span<const std::byte> module) {
  CUdevice device = 0;
  METRALE_TRY(cuda::check(driver, driver.cuDeviceGet_(&device, ordinal), "cuDeviceGet"));
  std::unique_ptr<CudaRawDevice> raw(new CudaRawDevice(driver, device));
  METRALE_TRY(raw->open(module));
  return raw;
}

Result<> CudaRawDevice::open(std::span<const std::byte> module) {
  std::array<char, 128> name{};
  METRALE_TRY(check(driver_.cuDeviceGetName_(name.data(), static_cast<int>(name.size()), device_), "cuDeviceGetName"));
  name_ = name.data();
  CUuuid uuid{};
  METRALE_TRY(check(driver_.cuDeviceGetUuid_(&uuid, device_), "cuDeviceGetUuid"));
  uuid_ = "GPU-" + cuda::uuid_text(uuid);
  METRALE_TRY(check(driver_.cuDevicePrimaryCtxRetain_(&context_, device_), "cuDevicePrimaryCtxRetain"));
  METRALE_TRY(enter());
  METRALE_TRY(check(driver_.cuModuleLoadDataEx_(&module_, module.data(), 0, nullptr, nullptr), "cuModuleLoadDataEx"));
  nop8_ = METRALE_TRY(function("nop8"));
  nop_waits_ = METRALE_TRY(function("nop_waits"));
  hold_ = METRALE_TRY(function("hold"));
  stream_ = METRALE_TRY(new_stream());
  counters_ = METRALE_TRY(new_memory(kCounterBytes));
  METRALE_TRY(check(driver_.cuMemsetD8Async_(counters_, 0, kCounterBytes, stream_), "cuMemsetD8Async"));
  start_ = METRALE_TRY(new_event());
  end_ = METRALE_TRY(new_event());
  // Each kernel once: the driver loads code at the first launch, which may not be one that is captured or timed.
  METRALE_TRY(launch_nops(1));
  METRALE_TRY(launch_dependent(1));
  METRALE_TRY(hold(reinterpret_cast<std::uint64_t>(stream_), 1));
  return synchronize();
}

CudaRawDevice::~CudaRawDevice() {
  if (context_ == nullptr) return;
  // A device that is lost refuses all of this, and the process ends soon.
  static_cast<void>(enter().has_value());
  if (stream_ != nullptr) driver_.cuStreamSynchronize_(stream_);
  blas_.reset();
  for (const auto& [graph, instance] : graphs_) {
    driver_.cuGraphExecDestroy_(instance);
    driver_.cuGraphDestroy_(graph);
  }
  for (CUevent event : marks_) driver_.cuEventDestroy_(event);
  for (CUevent event : {start_, end_}) {
    if (event != nullptr) driver_.cuEventDestroy_(event);
  }
  for (CUstream stream : pool_streams_) driver_.cuStreamDestroy_(stream);
  if (pool_ != nullptr) {
    cuuint64_t keep = 0;
    driver_.cuMemPoolSetAttribute_(pool_, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep);
  }
  for (CUdeviceptr memory : memory_) driver_.cuMemFree_(memory);
  for (void* memory : pinned_) driver_.cuMemFreeHost_(memory);
  if (stream_ != nullptr) driver_.cuStreamDestroy_(stream_);
  if (module_ != nullptr) driver_.cuModuleUnload_(module_);
  driver_.cuDevicePrimaryCtxRelease_(device_);
}

Result<> CudaRawDevice::check_shares_device(const GpuBackend& backend) const {
  METRALE_TRY(enter());
  const auto stream = reinterpret_cast<CUstream>(METRALE_TRY(backend.native_stream(backend.default_stream())));
  CUcontext theirs = nullptr;
  METRALE_TRY(check(driver_.cuStreamGetCtx_(stream, &theirs), "cuStreamGetCtx"));
  if (theirs == context_) return {};
  return Error(Errc::invalid_argument,
               fmt::format("the driver would be measured on {}, and the backend is on another device", uuid_));
}

Result<CUfunction> CudaRawDevice::function(const char* name) const {
  CUfunction found = nullptr;
  METRALE_TRY(check(driver_.cuModuleGetFunction_(&found, module_, name), "cuModuleGetFunction"));
  return found;
}

Result<CUstream> CudaRawDevice::new_stream() const {
  CUstream stream = nullptr;
  METRALE_TRY(check(driver_.cuStreamCreateWithPriority_(&stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority"));
  return stream;
}

Result<CUevent> CudaRawDevice::new_event() {
  CUevent event = nullptr;
  METRALE_TRY(check(driver_.cuEventCreate_(&event, CU_EVENT_DEFAULT), "cuEventCreate"));
  return event;
}

Result<CUdeviceptr> CudaRawDevice::new_memory(std::uint64_t bytes) {
  memory_.reserve(memory_.size() + 1);
  CUdeviceptr memory = 0;
  METRALE_TRY(check(driver_.cuMemAlloc_(&memory, bytes), "cuMemAlloc"));
  memory_.push_back(memory);
  return memory;
}

Result<> CudaRawDevice::synchronize() {
  METRALE_TRY(enter());
  return check(driver_.cuStreamSynchronize_(stream_), "cuStreamSynchronize");
}

// ---- launches ----

Result<> CudaRawDevice::launch_nops(std::uint32_t count) {
  METRALE_TRY(enter());
  std::uint32_t word = 1;
  std::array<void*, 8> params{&counters_, &counters_, &counters_, &counters_, &word, &word, &word, &word};
  for (std::uint32_t i = 0; i < count; ++i) {
    const CUresult code = driver_.cuLaunchKernel_(nop8_, 1, 1, 1, kNopThreads, 1, 1, 0, stream_, params.data(), nullptr);
    if (code != CUDA_SUCCESS) return check(code, "cuLaunchKernel");
  }
  return {};
}

Result<> CudaRawDevice::launch_and_wait(std::uint32_t count) {
  METRALE_TRY(enter());
  std::uint32_t word = 1;
  std::array<void*, 8> params{&counters_, &counters_, &counters_, &counters_, &word, &word, &word, &word};
  for (std::uint32_t i = 0; i < count; ++i) {
    CUresult code = driver_.cuLaunchKernel_(nop8_, 1, 1, 1, kNopThreads, 1, 1, 0, stream_, params.data(), nullptr);
    if (code == CUDA_SUCCESS) code = driver_.cuStreamSynchronize_(stream_);
    if (code != CUDA_SUCCESS) return check(code, "cuLaunchKernel, cuStreamSynchronize");
  }
  return {};
}

CUlaunchConfig CudaRawDevice::dependent_config(CUlaunchAttribute& attribute, std::uint32_t blocks, bool dependent) const {
  attribute = {};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = blocks;
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.blockDimX = kNopThreads;
  config.hStream = stream_;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return config;
}

Result<> CudaRawDevice::launch_dependent(std::uint32_t count) {
  METRALE_TRY(enter());
  CUlaunchAttribute attribute;
  const CUlaunchConfig config = dependent_config(attribute, 1, true);
  std::array<void*, 1> params{&counters_};
  for (std::uint32_t i = 0; i < count; ++i) {
    const CUresult code = driver_.cuLaunchKernelEx_(&config, nop_waits_, params.data(), nullptr);
    if (code != CUDA_SUCCESS) return check(code, "cuLaunchKernelEx");
  }
  return {};
}

// ---- memory ----

Result<> CudaRawDevice::alloc_free(std::uint64_t bytes, std::uint32_t count) {
  METRALE_TRY(enter());
  for (std::uint32_t i = 0; i < count; ++i) {
    CUdeviceptr memory = 0;
    CUresult code = driver_.cuMemAlloc_(&memory, bytes);
    if (code == CUDA_SUCCESS) code = driver_.cuMemFree_(memory);
    if (code != CUDA_SUCCESS) return check(code, "cuMemAlloc, cuMemFree");
  }
  return {};
}

Result<> CudaRawDevice::alloc_free_groups(std::uint64_t bytes, std::uint32_t group, std::uint32_t count) {
  METRALE_TRY(enter());
  std::vector<CUdeviceptr> held(group);
  for (std::uint32_t i = 0; i < count; ++i) {
    CUresult code = CUDA_SUCCESS;
    for (CUdeviceptr& memory : held) {
      if (code == CUDA_SUCCESS) code = driver_.cuMemAlloc_(&memory, bytes);
    }
    for (const CUdeviceptr memory : held) {
      if (code == CUDA_SUCCESS) code = driver_.cuMemFree_(memory);
    }
    if (code != CUDA_SUCCESS) return check(code, "cuMemAlloc, cuMemFree");
  }
  return {};
}

bool CudaRawDevice::has_pool() const noexcept {
  return driver_.cuMemAllocAsync_ != nullptr && driver_.cuMemFreeAsync_ != nullptr &&
         driver_.cuDeviceGetDefaultMemPool_ != nullptr && driver_.cuMemPoolSetAttribute_ != nullptr;
}

Result<> CudaRawDevice::open_pool(std::uint32_t streams) {
  METRALE_TRY(enter());
  METRALE_TRY(check(driver_.cuDeviceGetDefaultMemPool_(&pool_, device_), "cuDeviceGetDefaultMemPool"));
  cuuint64_t keep = UINT64_MAX;
  METRALE_TRY(check(driver_.cuMemPoolSetAttribute_(pool_, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep), "cuMemPoolSetAttribute"));
  while (pool_streams_.size() < streams) pool_streams_.push_back(METRALE_TRY(new_stream()));
  return {};
}

Result<double> CudaRawDevice::pool_ring(std::uint32_t stream, std::span<const std::uint64_t> sizes, std::uint32_t live) {
  using Clock = std::chrono::steady_clock;
  METRALE_TRY(enter());
  CUstream on = pool_streams_[stream];
  std::vector<CUdeviceptr> blocks(live);
  std::size_t oldest = 0;
  const Clock::time_point start = Clock::now();
  for (const std::uint64_t bytes : sizes) {
    CUresult code = blocks[oldest] == 0 ? CUDA_SUCCESS : driver_.cuMemFreeAsync_(blocks[oldest], on);
    if (code == CUDA_SUCCESS) code = driver_.cuMemAllocAsync_(&blocks[oldest], bytes, on);
    if (code != CUDA_SUCCESS) return check(code, "cuMemAllocAsync, cuMemFreeAsync").error();
    oldest = (oldest + 1) % blocks.size();
  }
  for (const CUdeviceptr block : blocks) {
    if (block == 0) continue;
    METRALE_TRY(check(driver_.cuMemFreeAsync_(block, on), "cuMemFreeAsync"));
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  METRALE_TRY(check(driver_.cuStreamSynchronize_(on), "cuStreamSynchronize"));
  return seconds * 1e9 / static_cast<double>(sizes.size());
}

Result<> CudaRawDevice::pinned_alloc_free(std::uint64_t bytes) {
  METRALE_TRY(enter());
  void* memory = nullptr;
  METRALE_TRY(check(driver_.cuMemHostAlloc_(&memory, bytes, 0), "cuMemHostAlloc"));
  return check(driver_.cuMemFreeHost_(memory), "cuMemFreeHost");
}

Result<std::unique_ptr<RawDevice>> open_raw_device(GpuBackend& backend, int ordinal) {
  if (backend.name() != "cuda") return std::unique_ptr<RawDevice>();
  const cuda::Driver* driver = METRALE_TRY(cuda::load_driver());
  const std::span<const cuda::ModuleImage> modules = cuda::kernel_modules();
  const auto module = std::ranges::find(modules, kBenchModule, &cuda::ModuleImage::name);
  if (module == modules.end()) {
    return Error(Errc::unsupported, "this build has no CUDA kernels, so there is nothing to launch; build with nvcc");
  }
  auto raw = METRALE_TRY(CudaRawDevice::create(*driver, ordinal, module->image));
  METRALE_TRY(raw->check_shares_device(backend));
  return std::unique_ptr<RawDevice>(std::move(raw));
}

}  // namespace metrale::bench
