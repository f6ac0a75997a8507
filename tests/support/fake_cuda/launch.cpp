// SPDX-License-Identifier: Apache-2.0
//
// Kernel launches: limits, attributes, and how a grid runs. Blocks run one after the other, those of a cooperative grid at once.
#include <cstring>
#include <memory>
#include <span>

#include "support/fake_cuda/api.h"
#include "support/fake_cuda/state.h"

namespace metrale::fake_cuda {

namespace {

constexpr std::uint64_t kBlocksPerMultiprocessor = 16;

/// Dynamic shared memory of one block, 64-byte aligned. A block finds what an earlier one left.
class SharedMemory {
 public:
  explicit SharedMemory(std::size_t bytes) : memory_(bytes + 64, std::byte{0xC9}) {
    void* first = memory_.data();
    std::size_t space = memory_.size();
    shared_ = {static_cast<std::byte*>(std::align(64, bytes, first, space)), bytes};
  }
  std::span<std::byte> get() const { return shared_; }

 private:
  std::vector<std::byte> memory_;
  std::span<std::byte> shared_;
};

CUresult run_block(const KernelCall& call, Dim3 index, const SharedMemory& shared) {
  const char* fault = nullptr;
  call.function->fn({call.grid, call.block, index, shared.get(), const_cast<const void* const*>(call.params.data()), &fault});
  return fault == nullptr ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

template <class Fn>
void for_each_block(Dim3 grid, Fn&& fn) {
  for (std::uint32_t z = 0; z < grid.z; ++z) {
    for (std::uint32_t y = 0; y < grid.y; ++y) {
      for (std::uint32_t x = 0; x < grid.x; ++x) fn(Dim3{x, y, z});
    }
  }
}

CUresult run_grid(const KernelCall& call) {
  if (call.function->is_unloaded) return CUDA_ERROR_ILLEGAL_ADDRESS;
  std::atomic<CUresult> code{CUDA_SUCCESS};
  const auto run = [&](Dim3 index, const SharedMemory& shared) {
    if (const CUresult answer = run_block(call, index, shared); answer != CUDA_SUCCESS) code = answer;
  };
  if (call.cooperative) {
    std::vector<std::thread> together;
    for_each_block(call.grid,
                   [&](Dim3 index) { together.emplace_back([&, index] { run(index, SharedMemory(call.shared_bytes)); }); });
    for (std::thread& thread : together) thread.join();
  } else {
    const SharedMemory shared(call.shared_bytes);
    for_each_block(call.grid, [&](Dim3 index) {
      if (code == CUDA_SUCCESS) run(index, shared);
    });
  }
  return code;
}

struct Attributes {
  bool cooperative = false;
  Dim3 cluster{1, 1, 1};
};

CUresult check_geometry(const Device& device, const Function& function, const CUlaunchConfig& config,
                        const Attributes& attributes) {
  const std::uint64_t threads = std::uint64_t{config.blockDimX} * config.blockDimY * config.blockDimZ;
  if (threads == 0 || config.gridDimX == 0 || config.gridDimY == 0 || config.gridDimZ == 0) return CUDA_ERROR_INVALID_VALUE;
  if (config.blockDimX > 1024 || config.blockDimY > 1024 || config.blockDimZ > 64 || threads > 1024)
    return CUDA_ERROR_INVALID_VALUE;
  if (config.gridDimX > INT32_MAX || config.gridDimY > 65535 || config.gridDimZ > 65535) return CUDA_ERROR_INVALID_VALUE;
  if (threads > static_cast<std::uint64_t>(function.max_threads)) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  if (config.sharedMemBytes > static_cast<unsigned>(function.max_dynamic_shared_bytes)) return CUDA_ERROR_INVALID_VALUE;
  const Dim3 c = attributes.cluster;
  if (c.count() != 1) {
    if (device.options.compute_capability < 90) return CUDA_ERROR_NOT_SUPPORTED;
    if (c.count() == 0 || c.count() > (function.allows_wide_clusters ? 16U : 8U)) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
    if (config.gridDimX % c.x != 0 || config.gridDimY % c.y != 0 || config.gridDimZ % c.z != 0) return CUDA_ERROR_INVALID_VALUE;
  }
  if (attributes.cooperative) {
    const std::uint64_t room = static_cast<std::uint64_t>(device.options.num_multiprocessors) * kBlocksPerMultiprocessor;
    if (std::uint64_t{config.gridDimX} * config.gridDimY * config.gridDimZ > room) return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  }
  return CUDA_SUCCESS;
}

CUresult read_attributes(const CUlaunchConfig& config, Attributes& attributes) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config.attrs[i];
    switch (attribute.id) {
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
      case CU_LAUNCH_ATTRIBUTE_PRIORITY: break;
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE: attributes.cooperative = attribute.value.cooperative != 0; break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
        attributes.cluster = {attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z};
        break;
      default: return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

/// Copies the arguments, from one pointer each or from one buffer with all of them.
CUresult read_params(const Function& function, void** params, void** extra, KernelCall& kernel) {
  const std::byte* buffer = nullptr;
  if (params == nullptr && extra != nullptr) {
    for (void** at = extra; *at != CU_LAUNCH_PARAM_END; at += 2) {
      if (*at == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = static_cast<const std::byte*>(at[1]);
    }
  }
  if (params == nullptr && buffer == nullptr && !function.param_bytes.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t i = 0; i < function.param_bytes.size(); ++i) {
    const auto* first = params != nullptr ? static_cast<const std::byte*>(params[i]) : buffer + function.param_offsets[i];
    if (first == nullptr) return CUDA_ERROR_INVALID_VALUE;
    kernel.values.emplace_back(first, first + function.param_bytes[i]);
  }
  for (auto& value : kernel.values) kernel.params.push_back(value.data());
  return CUDA_SUCCESS;
}

CUresult launch(const CUlaunchConfig& config, CUfunction handle, void** params, void** extra) {
  Call call(kInContext);
  const std::shared_ptr<Stream> stream = call ? call.stream(config.hStream) : nullptr;
  if (!call) return call.code;
  const std::shared_ptr<Function> function = call->functions.find(handle);
  if (function == nullptr) {
    call->misuse("a function was launched that is not there");
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (function->context != stream->context.get()) return CUDA_ERROR_INVALID_HANDLE;
  Attributes attributes;
  if (const CUresult code = read_attributes(config, attributes); code != CUDA_SUCCESS) return code;
  if (const CUresult code = check_geometry(*stream->context->device, *function, config, attributes); code != CUDA_SUCCESS)
    return code;
  auto kernel = std::make_shared<KernelCall>();
  kernel->handle = handle;
  kernel->function = function;
  kernel->context = stream->context->device->primary_handle;
  kernel->grid = {config.gridDimX, config.gridDimY, config.gridDimZ};
  kernel->block = {config.blockDimX, config.blockDimY, config.blockDimZ};
  kernel->shared_bytes = config.sharedMemBytes;
  kernel->cooperative = attributes.cooperative;
  if (const CUresult code = read_params(*function, params, extra, *kernel); code != CUDA_SUCCESS) return code;
  if (!function->is_loaded) {
    function->is_loaded = true;
    ++call->num_lazy_loads;
  }
  return submit(call, stream, CU_GRAPH_NODE_TYPE_KERNEL, [kernel] { return run_grid(*kernel); }, kernel);
}

}  // namespace

namespace api {

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned shared_bytes, CUstream stream, void** params, void** extra) {
  CUlaunchConfig config{};
  config.gridDimX = grid_x;
  config.gridDimY = grid_y;
  config.gridDimZ = grid_z;
  config.blockDimX = block_x;
  config.blockDimY = block_y;
  config.blockDimZ = block_z;
  config.sharedMemBytes = shared_bytes;
  config.hStream = stream;
  return launch(config, function, params, extra);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
  return config == nullptr ? CUDA_ERROR_INVALID_VALUE : launch(*config, function, params, extra);
}

// ---- what has no state ----

/// Checks what the real one checks first, and writes a recognisable map.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* address, const cuuint64_t* sizes,
                                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (reinterpret_cast<std::uintptr_t>(map) % 64 != 0 || reinterpret_cast<std::uintptr_t>(address) % 16 != 0)
    return CUDA_ERROR_INVALID_VALUE;
  if (rank < 1 || rank > 5) return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || box[i] == 0 || box[i] > 256 || element_strides[i] == 0) return CUDA_ERROR_INVALID_VALUE;
    if (i + 1 < rank && strides[i] % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  }
  std::memset(map, 0, sizeof(*map));
  map->opaque[0] = reinterpret_cast<std::uintptr_t>(address);
  map->opaque[1] = rank;
  for (cuuint32_t i = 0; i < rank; ++i) {
    map->opaque[2 + i] = sizes[i];
    map->opaque[7 + i] = box[i];
  }
  return CUDA_SUCCESS;
}

CUresult cuLogsRegisterCallback(CUlogsCallback fn, void* data, CUlogsCallbackHandle* handle) {
  State* state = current_state.load();
  if (state == nullptr) return CUDA_ERROR_DEINITIALIZED;
  const std::lock_guard lock(state->log_mutex);
  state->last_log_callback += 64;
  state->log_callbacks.emplace(state->last_log_callback, State::LogCallback{fn, data});
  *handle = reinterpret_cast<CUlogsCallbackHandle>(state->last_log_callback);
  return CUDA_SUCCESS;
}

}  // namespace api
}  // namespace metrale::fake_cuda
