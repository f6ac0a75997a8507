// SPDX-License-Identifier: Apache-2.0
//
// Errors, devices and contexts.
#include <fmt/format.h>

#include <cstring>

#include "support/fake_cuda/api.h"
#include "support/fake_cuda/state.h"

namespace metrale::fake_cuda {

namespace {

struct Named {
  CUresult code;
  const char* name;
  const char* text;
};

#define METRALE_FAKE_CUDA_ERROR(name, text) \
  Named { name, #name, text }
constexpr Named kErrors[] = {
    METRALE_FAKE_CUDA_ERROR(CUDA_SUCCESS, "no error"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
                            "part or all of the requested memory range is already mapped"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "too many blocks in cooperative launch"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                            "operation would make the legacy stream depend on a capturing blocking stream"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
                            "attempt to terminate a thread-local capture sequence from another thread"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_INVALID_CLUSTER_SIZE, "cluster misconfiguration"),
    METRALE_FAKE_CUDA_ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};
#undef METRALE_FAKE_CUDA_ERROR

CUresult find_error(CUresult code, const char* Named::* field, const char** text) {
  for (const Named& error : kErrors) {
    if (error.code != code) continue;
    *text = error.*field;
    return CUDA_SUCCESS;
  }
  *text = nullptr;
  return CUDA_ERROR_INVALID_VALUE;
}

Device* find_device(Call& call, CUdevice device) {
  if (!call) return nullptr;
  if (device >= 0 && static_cast<std::size_t>(device) < call->devices.size())
    return &call->devices[static_cast<std::size_t>(device)];
  call.code = CUDA_ERROR_INVALID_DEVICE;
  return nullptr;
}

}  // namespace

bool is_sticky(CUresult code) noexcept {
  switch (code) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_ECC_UNCORRECTABLE: return true;
    default: return false;
  }
}

void State::destroy_primary(Lock& lock, Device& device) {
  const std::shared_ptr<Context> kept = device.primary;
  Context& context = *kept;
  (void)wait_for_all(lock, context);
  const auto note = [&](std::size_t count, std::string_view what) {
    if (count > 0) dropped.push_back(fmt::format("{} {}", count, what));
  };
  const auto here = [&](const auto& object) { return object.context == &context; };
  for (const auto& capture : std::vector(captures)) {
    if (capture->context != &context) continue;
    dropped.emplace_back("an open capture");
    end(*capture);
  }
  note(streams.remove_if([&](const Stream& s) { return s.context.get() == &context; }).size(), "streams");
  context.streams.clear();
  context.null_stream = nullptr;
  note(events.remove_if(here).size(), "events");
  note(execs.remove_if(here).size(), "executable graphs");
  note(modules.remove_if(here).size(), "modules");
  for (const auto& function : functions.remove_if(here)) function->is_unloaded = true;
  std::size_t num_blocks = 0;
  for (auto at = blocks.begin(); at != blocks.end();) {
    if (at->second.context != &context) {
      ++at;
      continue;
    }
    if (at->second.kind != BlockKind::global) ++num_blocks;
    device.used_bytes -= at->second.charged;
    at = blocks.erase(at);
  }
  note(num_blocks, "blocks of memory");
  contexts.remove(device.primary_handle);
  device.primary = nullptr;
  device.primary_handle = nullptr;
}

namespace api {

CUresult cuGetErrorName(CUresult error, const char** name) { return find_error(error, &Named::name, name); }
CUresult cuGetErrorString(CUresult error, const char** text) { return find_error(error, &Named::text, text); }

CUresult cuInit(unsigned) {
  State* state = current_state.load();
  if (state == nullptr) return CUDA_ERROR_DEINITIALIZED;
  const std::lock_guard lock(state->mutex);
  if (state->devices.empty()) return CUDA_ERROR_NO_DEVICE;
  state->is_initialised = true;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  State* state = current_state.load();
  if (state == nullptr) return CUDA_ERROR_DEINITIALIZED;
  *version = state->options.driver_version;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  Call call(kAnywhere);
  if (call) *count = static_cast<int>(call->devices.size());
  return call.code;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  Call call(kAnywhere);
  if (find_device(call, ordinal) != nullptr) *device = ordinal;
  return call.code;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  Call call(kAnywhere);
  if (const Device* found = find_device(call, device); found != nullptr && length > 0) {
    std::strncpy(name, found->options.name.c_str(), static_cast<std::size_t>(length));
    name[length - 1] = '\0';
  }
  return call.code;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  Call call(kAnywhere);
  if (find_device(call, device) != nullptr) {
    std::memset(uuid, 0, sizeof(*uuid));
    uuid->bytes[0] = 'F';
    std::memcpy(uuid->bytes + 1, &call->number, sizeof(call->number));
    uuid->bytes[15] = static_cast<char>(device);
  }
  return call.code;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  Call call(kAnywhere);
  const Device* found = find_device(call, device);
  if (found == nullptr) return call.code;
  const DeviceOptions& options = found->options;
  const int capability = options.compute_capability;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = options.num_multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED: *value = options.integrated; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = INT32_MAX; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 48 << 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 << 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 228 << 10; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1'980'000; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 60 << 20; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = device + 1; break;
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS: *value = options.managed_memory; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: *value = capability >= 60; break;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED: *value = capability >= 90; break;
    default: *value = 0; break;
  }
  return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  Call call(kAnywhere);
  const Device* from = find_device(call, device);
  const Device* to = find_device(call, peer);
  if (from != nullptr && to != nullptr) *can = from != to && from->options.reaches_peers && to->options.reaches_peers;
  return call.code;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* handle, CUdevice ordinal) {
  Call call(kAnywhere);
  Device* device = find_device(call, ordinal);
  if (device == nullptr) return call.code;
  if (device->sticky != CUDA_SUCCESS) return device->sticky;
  if (device->primary == nullptr) {
    if (const CUresult code = call->unsafe(); code != CUDA_SUCCESS) return code;
    device->primary = std::make_shared<Context>();
    device->primary->device = device;
    device->primary->ordinal = ordinal;
    device->primary->null_stream = std::make_shared<Stream>();
    device->primary->null_stream->context = device->primary;
    device->primary_handle = call->contexts.add(device->primary);
  }
  ++device->primary->num_retains;
  *handle = device->primary_handle;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice ordinal) {
  Call call(kAnywhere);
  Device* device = find_device(call, ordinal);
  if (device == nullptr) return call.code;
  if (device->primary == nullptr) {
    call->misuse("a primary context was released more often than retained");
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  if (--device->primary->num_retains == 0) {
    call->destroy_primary(call.lock, *device);
  }
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  Call call(kAnywhere);
  if (call) *context = current_context;
  return call.code;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  Call call(kAnywhere);
  if (!call) return call.code;
  if (context != nullptr && call->contexts.find(context) == nullptr) {
    call->misuse("a context was made current that is not there");
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  current_context = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
  Call call(kInContext);
  if (!call) return call.code;
  CUresult code = CUDA_SUCCESS;
  for (const auto& capture : call->captures) {
    if (capture->context == call.context.get()) code = call->invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  }
  if (code != CUDA_SUCCESS) return code;
  return call->wait_for_all(call.lock, *call.context);
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  Call call(kInContext);
  if (!call) return call.code;
  const std::shared_ptr<Context> other = call->contexts.find(peer);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (other == nullptr || other == call.context) return CUDA_ERROR_INVALID_CONTEXT;
  return call.context->peers.insert(other.get()).second ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  Call call(kInContext);
  if (!call) return call.code;
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}

}  // namespace api
}  // namespace metrale::fake_cuda
