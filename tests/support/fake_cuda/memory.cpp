// SPDX-License-Identifier: Apache-2.0
//
// Device, managed, pinned and registered memory. Addresses are those of host memory, so that kernels can compute; one table knows
// what each is.
#include <cstring>
#include <new>

#include "support/fake_cuda/api.h"
#include "support/fake_cuda/state.h"

namespace metrale::fake_cuda {

namespace {

constexpr std::size_t kAlignment = 512;
constexpr std::uint64_t kGranule = 512;
constexpr int kFreshByte = 0xC9;  // code that relies on zeros must not work by luck

std::shared_ptr<std::byte> host_memory(std::uint64_t bytes) {
  void* memory = ::operator new(bytes, std::align_val_t{kAlignment}, std::nothrow);
  if (memory == nullptr) return nullptr;
  std::memset(memory, kFreshByte, bytes);
  return {static_cast<std::byte*>(memory), [](std::byte* at) { ::operator delete(at, std::align_val_t{kAlignment}); }};
}

}  // namespace

Block* State::find_block(std::uint64_t address, std::uint64_t bytes) {
  auto at = blocks.upper_bound(address);
  if (at == blocks.begin()) return nullptr;
  --at;
  Block& block = at->second;
  const std::uint64_t offset = address - at->first;
  return !block.is_going && offset <= block.bytes && bytes <= block.bytes - offset ? &block : nullptr;
}

CUresult State::allocate(Context& context, BlockKind kind, std::uint64_t bytes, std::uint64_t* address) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  Device& device = *context.device;
  Block block;
  block.kind = kind;
  block.bytes = bytes;
  block.context = &context;
  if (kind == BlockKind::device || kind == BlockKind::managed) {
    const std::uint64_t free = device.options.total_bytes - std::min(device.options.total_bytes, device.used_bytes);
    // Managed memory may be more than the device has; what the host has ends it here.
    if (bytes > (std::uint64_t{1} << 46)) return CUDA_ERROR_OUT_OF_MEMORY;
    block.charged = (bytes + kGranule - 1) / kGranule * kGranule;
    if (kind == BlockKind::device && block.charged > free) return CUDA_ERROR_OUT_OF_MEMORY;
    if (kind == BlockKind::managed) block.charged = std::min(block.charged, free);
  }
  block.memory = host_memory(bytes);
  if (block.memory == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<std::uintptr_t>(block.memory.get());
  device.used_bytes += block.charged;
  blocks.emplace(*address, std::move(block));
  return CUDA_SUCCESS;
}

void State::release_block(std::uint64_t base) {
  const auto at = blocks.find(base);
  if (at == blocks.end()) return;
  if (at->second.context != nullptr) at->second.context->device->used_bytes -= at->second.charged;
  blocks.erase(at);
}

namespace {

/// Gives `base` back once all work of its context is done, as the driver does.
CUresult release(Call& call, std::uint64_t base, std::initializer_list<BlockKind> kinds, CUresult unknown, const char* what) {
  const auto at = call->blocks.find(base);
  const bool known =
      at != call->blocks.end() && !at->second.is_going && std::find(kinds.begin(), kinds.end(), at->second.kind) != kinds.end();
  if (!known) {
    call->misuse(std::string(what) + " of what is no live base");
    return unknown;
  }
  at->second.is_going = true;
  const CUresult code = call->wait_for_all(call.lock, *at->second.context);
  if (code != CUDA_SUCCESS) {
    at->second.is_going = false;
    return code;
  }
  call->release_block(base);
  return CUDA_SUCCESS;
}

}  // namespace

namespace api {

CUresult cuMemGetInfo(std::size_t* free, std::size_t* total) {
  Call call(kInContext);
  if (!call) return call.code;
  const Device& device = *call.context->device;
  *total = device.options.total_bytes;
  *free = device.options.total_bytes - std::min(device.options.total_bytes, device.used_bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* address, std::size_t bytes) {
  Call call(kInContext | kUnsafe);
  if (!call) return call.code;
  std::uint64_t at = 0;
  const CUresult code = call->allocate(*call.context, BlockKind::device, bytes, &at);
  if (code == CUDA_SUCCESS) *address = at;
  return code;
}

CUresult cuMemAllocManaged(CUdeviceptr* address, std::size_t bytes, unsigned flags) {
  Call call(kInContext | kUnsafe);
  if (!call) return call.code;
  if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST) return CUDA_ERROR_INVALID_VALUE;
  std::uint64_t at = 0;
  const CUresult code = call->allocate(*call.context, BlockKind::managed, bytes, &at);
  if (code == CUDA_SUCCESS) *address = at;
  return code;
}

CUresult cuMemFree(CUdeviceptr address) {
  Call call(kInContext | kUnsafe);
  if (!call) return call.code;
  if (address == 0) return CUDA_SUCCESS;
  return release(call, address, {BlockKind::device, BlockKind::managed}, CUDA_ERROR_INVALID_VALUE, "cuMemFree");
}

CUresult cuMemHostAlloc(void** memory, std::size_t bytes, unsigned flags) {
  Call call(kInContext | kUnsafe);
  if (!call) return call.code;
  if ((flags & ~7U) != 0) return CUDA_ERROR_INVALID_VALUE;
  std::uint64_t at = 0;
  const CUresult code = call->allocate(*call.context, BlockKind::pinned, bytes, &at);
  if (code == CUDA_SUCCESS) *memory = reinterpret_cast<void*>(static_cast<std::uintptr_t>(at));
  return code;
}

CUresult cuMemFreeHost(void* memory) {
  Call call(kInContext | kUnsafe);
  if (!call) return call.code;
  return release(call, reinterpret_cast<std::uintptr_t>(memory), {BlockKind::pinned}, CUDA_ERROR_INVALID_VALUE, "cuMemFreeHost");
}

CUresult cuMemHostRegister(void* memory, std::size_t bytes, unsigned flags) {
  Call call(kInContext | kUnsafe);
  if (!call) return call.code;
  if (memory == nullptr || bytes == 0 || (flags & ~15U) != 0) return CUDA_ERROR_INVALID_VALUE;
  const auto first = reinterpret_cast<std::uintptr_t>(memory);
  const auto next = call->blocks.lower_bound(first);
  if (next != call->blocks.end() && next->first < first + bytes) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  if (next != call->blocks.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second.bytes > first) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  Block block;
  block.kind = BlockKind::registered;
  block.bytes = bytes;
  block.context = call.context.get();
  call->blocks.emplace(first, std::move(block));
  return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void* memory) {
  Call call(kInContext | kUnsafe);
  if (!call) return call.code;
  return release(call, reinterpret_cast<std::uintptr_t>(memory), {BlockKind::registered}, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
                 "cuMemHostUnregister");
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr* address, void* memory, unsigned flags) {
  Call call(kInContext);
  if (!call) return call.code;
  const auto at = reinterpret_cast<std::uintptr_t>(memory);
  const Block* block = call->find_block(at, 1);
  if (flags != 0 || block == nullptr || (block->kind != BlockKind::pinned && block->kind != BlockKind::registered))
    return CUDA_ERROR_INVALID_VALUE;
  *address = at;
  return CUDA_SUCCESS;
}

// ---- the driver's pool: a block at a time, without reuse ----

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
  Call call(kAnywhere);
  if (!call) return call.code;
  if (device < 0 || static_cast<std::size_t>(device) >= call->devices.size()) return CUDA_ERROR_INVALID_DEVICE;
  *pool = reinterpret_cast<CUmemoryPool>(static_cast<std::uintptr_t>(64 * (device + 1)));
  return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute, void* value) {
  Call call(kAnywhere);
  if (call && (pool == nullptr || value == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return call.code;
}

CUresult cuMemAllocAsync(CUdeviceptr* address, std::size_t bytes, CUstream handle) {
  Call call(kInContext);
  const std::shared_ptr<Stream> stream = call ? call.stream(handle) : nullptr;
  if (!call) return call.code;
  if (stream->capture) return call->invalidate(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  std::uint64_t at = 0;
  const CUresult code = call->allocate(*stream->context, BlockKind::device, bytes, &at);
  if (code == CUDA_SUCCESS) *address = at;
  return code;
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
  Call call(kInContext);
  const std::shared_ptr<Stream> stream = call ? call.stream(handle) : nullptr;
  if (!call) return call.code;
  if (stream->capture) return call->invalidate(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  const auto at = call->blocks.find(address);
  if (at == call->blocks.end() || at->second.is_going || at->second.kind != BlockKind::device) {
    call->misuse("cuMemFreeAsync of what is no live base");
    return CUDA_ERROR_INVALID_VALUE;
  }
  at->second.is_going = true;
  State* state = call.state;
  return submit(call, stream, CU_GRAPH_NODE_TYPE_MEM_FREE, [state, address] {
    const std::lock_guard lock(state->mutex);
    state->release_block(address);
    return CUDA_SUCCESS;
  });
}

}  // namespace api
}  // namespace metrale::fake_cuda
