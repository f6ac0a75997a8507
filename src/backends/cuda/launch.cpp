// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <set>

#include "backends/cuda/cuda_backend.h"

namespace metrale::cuda {

namespace {

// A cluster of more blocks than every device of its kind can run has to be allowed first.
constexpr std::uint64_t kPortableCluster = 8;

/// The text, kept as long as the process: fault reports may name a kernel whose module is gone.
const std::string* kept(const std::string& name) {
  struct Names {
    std::mutex mutex;
    std::set<std::string> all;
  };
  static Names& names = *new Names;
  std::lock_guard lock(names.mutex);
  return &*names.all.insert(name).first;
}

}  // namespace

Result<NativeKernel> CudaBackend::do_find_kernel(std::string_view module, std::string_view function) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  const Kernel* kernel = METRALE_TRY(noted(modules_.find(module, function)));
  std::lock_guard lock(kernels_mutex_);
  std::unique_ptr<KernelRecord>& record = kernels_[kernel];
  if (record == nullptr) {
    record = std::make_unique<KernelRecord>();
    record->function = kernel->function;
    record->kernel = kernel;
    record->name = kept(kernel->name);
  }
  return NativeKernel{reinterpret_cast<std::uintptr_t>(record.get())};
}

Result<bool> CudaBackend::do_has_module(std::string_view module) { return modules_.has_module(module); }

Result<KernelFacts> CudaBackend::do_kernel_facts(NativeKernel kernel) { return kernel_of(kernel).kernel->facts; }

Result<> CudaBackend::do_unload_modules() {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  METRALE_TRY(do_wait_for_earlier_work());
  std::lock_guard lock(kernels_mutex_);
  kernels_.clear();
  return noted(modules_.unload());
}

Result<> CudaBackend::do_launch(const LaunchDesc& launch) {
  const KernelRecord& kernel = kernel_of(launch.kernel);
  void* pointers[kMaxKernelArgs];
  void** params = const_cast<void**>(launch.raw_params);
  if (params == nullptr) {
    for (std::size_t i = 0; i < launch.args.size(); ++i) pointers[i] = const_cast<void*>(launch.args[i].data());
    params = pointers;
  }
  const CUstream stream = stream_of(launch.stream);
  const bool is_plain = !launch.attributes->any();
  const CUresult code = context_->on_stream([&] {
    if (!is_plain) [[unlikely]]
      return launch_with_attributes(launch, params);
    return driver_.cuLaunchKernel_(kernel.function, launch.grid.x, launch.grid.y, launch.grid.z, launch.block.x, launch.block.y,
                                   launch.block.z, launch.shared_bytes, stream, params, nullptr);
  });
  if (StreamRecord* record = work().find(stream, this)) [[likely]] {
    record->last_kernel.store(kernel.name, std::memory_order_relaxed);
    record->note();
  }
  if (code == CUDA_SUCCESS) [[likely]]
    return {};
  return launch_error(launch, code);
}

CUresult CudaBackend::launch_with_attributes(const LaunchDesc& launch, void** params) {
  KernelRecord& kernel = kernel_of(launch.kernel);
  const LaunchAttributes& asked = *launch.attributes;
  CUlaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (asked.cluster != Dim3{0, 0, 0}) {
    if (asked.cluster.count() > kPortableCluster && !kernel.allows_wide_clusters.load(std::memory_order_relaxed)) {
      const CUresult code = driver_.cuFuncSetAttribute_(kernel.function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1);
      if (code != CUDA_SUCCESS) return code;
      kernel.allows_wide_clusters.store(true, std::memory_order_relaxed);
    }
    CUlaunchAttribute& attribute = attributes[count++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim.x = asked.cluster.x;
    attribute.value.clusterDim.y = asked.cluster.y;
    attribute.value.clusterDim.z = asked.cluster.z;
  }
  if (asked.cooperative) {
    CUlaunchAttribute& attribute = attributes[count++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attribute.value.cooperative = 1;
  }
  if (asked.dependent_launch) {
    CUlaunchAttribute& attribute = attributes[count++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
  }
  CUlaunchConfig config{};
  config.gridDimX = launch.grid.x;
  config.gridDimY = launch.grid.y;
  config.gridDimZ = launch.grid.z;
  config.blockDimX = launch.block.x;
  config.blockDimY = launch.block.y;
  config.blockDimZ = launch.block.z;
  config.sharedMemBytes = launch.shared_bytes;
  config.hStream = stream_of(launch.stream);
  config.attrs = attributes;
  config.numAttrs = count;
  return driver_.cuLaunchKernelEx_(&config, kernel.function, params, nullptr);
}

Error CudaBackend::launch_error(const LaunchDesc& launch, CUresult code) {
  const Kernel& kernel = *kernel_of(launch.kernel).kernel;
  Error error = context_->error(code, launch.attributes->any() ? "cuLaunchKernelEx" : "cuLaunchKernel");
  if (error.code() != Errc::invalid_argument) return error;
  return std::move(error).with_note(
      fmt::format("{} runs in blocks of at most {} threads with at most {} bytes of dynamic shared memory", kernel.name,
                  kernel.max_threads, kernel.max_dynamic_shared_bytes));
}

}  // namespace metrale::cuda
