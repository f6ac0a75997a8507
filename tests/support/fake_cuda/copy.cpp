// SPDX-License-Identifier: Apache-2.0
//
// Copies and fills. A pageable source is read during the call: small ones are staged, large ones make the call wait, as in the
// real driver. Pinned ends are truly asynchronous.
#include <cstring>

#include "support/fake_cuda/api.h"
#include "support/fake_cuda/state.h"

namespace metrale::fake_cuda {

namespace {

constexpr std::size_t kStagedBytes = 64 << 10;

std::byte* at(std::uint64_t address) { return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address)); }
std::uint64_t address_of(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

/// A copy's order, its stream, and whether the call may go on.
struct Transfer {
  explicit Transfer(CUstream handle) : call(kInContext) {
    if (call) stream = call.stream(handle);
  }
  explicit operator bool() const { return static_cast<bool>(call); }

  /// Whether the device knows all of it.
  bool knows(std::uint64_t address, std::uint64_t bytes) { return call->find_block(address, bytes) != nullptr; }
  bool is_pinned(const void* memory, std::uint64_t bytes) {
    const Block* block = call->find_block(address_of(memory), bytes);
    return block != nullptr && block->kind != BlockKind::device && block->kind != BlockKind::global;
  }
  CUresult submit(std::function<CUresult()> run, bool waits = false) {
    DonePtr done;
    const CUresult code = fake_cuda::submit(call, stream, CU_GRAPH_NODE_TYPE_MEMCPY, std::move(run), nullptr, &done);
    return code == CUDA_SUCCESS && waits ? call->wait(call.lock, *stream->context, done) : code;
  }
  CUresult copy(std::byte* dst, const std::byte* src, std::size_t bytes, bool waits = false) {
    if (bytes == 0) return CUDA_SUCCESS;
    return submit(
        [=] {
          std::memmove(dst, src, bytes);
          return CUDA_SUCCESS;
        },
        waits);
  }
  /// Pageable memory cannot be part of a graph.
  CUresult refuse_pageable() {
    if (stream->capture->is_invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    return call->invalidate(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  }

  CUresult to_device(std::uint64_t dst, const void* src, std::size_t bytes) {
    if (!knows(dst, bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (is_pinned(src, bytes)) return copy(at(dst), static_cast<const std::byte*>(src), bytes);
    if (stream->capture) return refuse_pageable();
    if (bytes > kStagedBytes) return copy(at(dst), static_cast<const std::byte*>(src), bytes, true);
    if (bytes == 0) return CUDA_SUCCESS;
    const auto* first = static_cast<const std::byte*>(src);
    return submit([dst, staged = std::vector<std::byte>(first, first + bytes)] {
      std::memcpy(at(dst), staged.data(), staged.size());
      return CUDA_SUCCESS;
    });
  }
  CUresult to_host(void* dst, std::uint64_t src, std::size_t bytes) {
    if (!knows(src, bytes)) return CUDA_ERROR_INVALID_VALUE;
    const bool pinned = is_pinned(dst, bytes);
    if (!pinned && stream->capture) return refuse_pageable();
    return copy(static_cast<std::byte*>(dst), at(src), bytes, !pinned);
  }
  CUresult on_device(std::uint64_t dst, std::uint64_t src, std::size_t bytes) {
    if (!knows(dst, bytes) || !knows(src, bytes)) return CUDA_ERROR_INVALID_VALUE;
    return copy(at(dst), at(src), bytes);
  }

  Call call;
  std::shared_ptr<Stream> stream;
};

}  // namespace

namespace api {

CUresult cuMemcpyHtoDAsync(CUdeviceptr dst, const void* src, std::size_t bytes, CUstream stream) {
  Transfer transfer(stream);
  return transfer ? transfer.to_device(dst, src, bytes) : transfer.call.code;
}

CUresult cuMemcpyDtoHAsync(void* dst, CUdeviceptr src, std::size_t bytes, CUstream stream) {
  Transfer transfer(stream);
  return transfer ? transfer.to_host(dst, src, bytes) : transfer.call.code;
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes, CUstream stream) {
  Transfer transfer(stream);
  return transfer ? transfer.on_device(dst, src, bytes) : transfer.call.code;
}

CUresult cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src, CUcontext src_context, std::size_t bytes,
                           CUstream stream) {
  Transfer transfer(stream);
  if (!transfer) return transfer.call.code;
  State& state = *transfer.call.state;
  const std::shared_ptr<Context> from = state.contexts.find(src_context);
  const std::shared_ptr<Context> to = state.contexts.find(dst_context);
  if (from == nullptr || to == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (from->sticky != CUDA_SUCCESS) return from->sticky;
  if (to->sticky != CUDA_SUCCESS) return to->sticky;
  const Block* from_block = state.find_block(src, bytes);
  const Block* to_block = state.find_block(dst, bytes);
  if (from_block == nullptr || to_block == nullptr || from_block->context != from.get() || to_block->context != to.get())
    return CUDA_ERROR_INVALID_VALUE;
  return transfer.copy(at(dst), at(src), bytes);
}

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream stream) {
  Transfer transfer(stream);
  if (!transfer) return transfer.call.code;
  const CUDA_MEMCPY2D c = *copy;
  if (c.srcMemoryType != CU_MEMORYTYPE_DEVICE || c.dstMemoryType != CU_MEMORYTYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  if (c.WidthInBytes == 0 || c.Height == 0) return CUDA_SUCCESS;
  const std::uint64_t src_pitch = c.srcPitch == 0 ? c.WidthInBytes + c.srcXInBytes : c.srcPitch;
  const std::uint64_t dst_pitch = c.dstPitch == 0 ? c.WidthInBytes + c.dstXInBytes : c.dstPitch;
  if (c.WidthInBytes + c.srcXInBytes > src_pitch || c.WidthInBytes + c.dstXInBytes > dst_pitch) return CUDA_ERROR_INVALID_VALUE;
  const std::uint64_t src = c.srcDevice + c.srcY * src_pitch + c.srcXInBytes;
  const std::uint64_t dst = c.dstDevice + c.dstY * dst_pitch + c.dstXInBytes;
  if (!transfer.knows(src, (c.Height - 1) * src_pitch + c.WidthInBytes) ||
      !transfer.knows(dst, (c.Height - 1) * dst_pitch + c.WidthInBytes))
    return CUDA_ERROR_INVALID_VALUE;
  return transfer.submit([=] {
    for (std::size_t row = 0; row < c.Height; ++row) {
      std::memmove(at(dst + row * dst_pitch), at(src + row * src_pitch), c.WidthInBytes);
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuMemcpyBatchAsync(CUdeviceptr* dsts, CUdeviceptr* srcs, std::size_t* sizes, std::size_t count,
                            CUmemcpyAttributes* attributes, std::size_t* first_of, std::size_t num_attributes, CUstream stream) {
  Transfer transfer(stream);
  if (!transfer) return transfer.call.code;
  if (transfer.stream->capture) return transfer.refuse_pageable();
  if (transfer.stream == transfer.call.context->null_stream) return CUDA_ERROR_INVALID_VALUE;
  if (count == 0 || num_attributes == 0 || num_attributes > count || first_of[0] != 0) return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t i = 0; i < num_attributes; ++i) {
    if (attributes[i].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_INVALID) return CUDA_ERROR_INVALID_VALUE;
    if (i > 0 && (first_of[i] <= first_of[i - 1] || first_of[i] >= count)) return CUDA_ERROR_INVALID_VALUE;
  }
  struct One {
    std::byte* dst;
    const std::byte* src;
    std::size_t bytes;
    std::vector<std::byte> staged;
  };
  auto list = std::make_shared<std::vector<One>>();
  bool waits = false;
  std::size_t attribute = 0;
  for (std::size_t i = 0; i < count; ++i) {
    while (attribute + 1 < num_attributes && first_of[attribute + 1] <= i) ++attribute;
    if (sizes[i] == 0 || dsts[i] == 0 || srcs[i] == 0) return CUDA_ERROR_INVALID_VALUE;
    const bool known_dst = transfer.knows(dsts[i], sizes[i]);
    const bool known_src = transfer.knows(srcs[i], sizes[i]);
    if (!known_dst && !known_src) return CUDA_ERROR_INVALID_VALUE;
    One& one = list->emplace_back(One{at(dsts[i]), at(srcs[i]), sizes[i], {}});
    const bool during = attributes[attribute].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    if (!known_src && (during || sizes[i] <= kStagedBytes)) one.staged.assign(one.src, one.src + one.bytes);
    if (!known_dst) waits = true;
  }
  return transfer.submit(
      [list] {
        for (const One& one : *list) std::memmove(one.dst, one.staged.empty() ? one.src : one.staged.data(), one.bytes);
        return CUDA_SUCCESS;
      },
      waits);
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, std::size_t bytes, CUstream handle) {
  Call call(kInContext);
  const std::shared_ptr<Stream> stream = call ? call.stream(handle) : nullptr;
  if (!call) return call.code;
  if (call->find_block(dst, bytes) == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (bytes == 0) return CUDA_SUCCESS;
  return submit(call, stream, CU_GRAPH_NODE_TYPE_MEMSET, [=] {
    std::memset(at(dst), value, bytes);
    return CUDA_SUCCESS;
  });
}

}  // namespace api
}  // namespace metrale::fake_cuda
