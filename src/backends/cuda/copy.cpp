// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "backends/cuda/cuda_backend.h"

namespace metrale::cuda {

namespace {

// Small sources share a block of this size on each stream, so that most copies cost no event.
constexpr std::uint64_t kStagingBlock = std::uint64_t{256} << 10;
constexpr std::uint64_t kSmall = std::uint64_t{64} << 10;
// Larger ones go in pieces, so that the device begins while the host still copies.
constexpr std::uint64_t kPiece = std::uint64_t{4} << 20;
// With this much on its way a copy waits for the pieces before it.
constexpr std::uint64_t kMostStaged = std::uint64_t{64} << 20;

/// Bytes that a graph owns.
struct Frozen {
  std::shared_ptr<PinnedPool> pool;  // shared: the graph may be the last to use it
  void* bytes;
};

void CUDA_CB drop_frozen(void* object) {
  const std::unique_ptr<Frozen> frozen(static_cast<Frozen*>(object));
  frozen->pool->give(frozen->bytes);
}

}  // namespace

Result<> CudaBackend::do_copy_h2d_async(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream stream, bool retained) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  if (retained)
    return enqueued(stream, driver_.cuMemcpyHtoDAsync_(dst.address, src, bytes, stream_of(stream)), "cuMemcpyHtoDAsync");
  if (METRALE_TRY(noted(work().is_captured(stream_of(stream))))) return copy_frozen(dst, src, bytes, stream);
  StreamRecord* record = work().find(stream_of(stream), this);
  if (record == nullptr) return Error(Errc::invalid_argument, "copy_h2d_async on a stream that was destroyed");
  const auto* from = static_cast<const std::byte*>(src);
  return bytes <= kSmall ? copy_staged_small(dst, from, bytes, stream, *record) : copy_staged(dst, from, bytes, stream, *record);
}

Result<> CudaBackend::copy_staged_small(DevicePtr dst, const std::byte* src, std::uint64_t bytes, NativeStream stream,
                                        StreamRecord& record) {
  StagingCursor& cursor = record.staging;
  std::lock_guard lock(cursor.mutex);
  // What was staged before is on the device by now.
  if (record.looks_idle()) cursor.used = 0;
  if (cursor.block != nullptr && cursor.used + bytes > kStagingBlock) close_staging(record);
  if (cursor.block == nullptr) {
    reap();
    cursor.block = static_cast<std::byte*>(METRALE_TRY(noted(pinned_->take(kStagingBlock))));
    cursor.used = 0;
  }
  std::byte* staged = cursor.block + cursor.used;
  std::memcpy(staged, src, bytes);
  cursor.used += round_up(bytes, kPinnedAlignment);
  return enqueued(stream, driver_.cuMemcpyHtoDAsync_(dst.address, staged, bytes, stream_of(stream)), "cuMemcpyHtoDAsync");
}

void CudaBackend::close_staging(StreamRecord& record) noexcept {
  StagingCursor& cursor = record.staging;
  if (cursor.block == nullptr) return;
  part_with_staged(std::exchange(cursor.block, nullptr), kStagingBlock, record);
  cursor.used = 0;
}

void CudaBackend::part_with_staged(void* block, std::uint64_t bytes, StreamRecord& record) noexcept {
  Parting parting{.kind = Parting::Kind::pinned, .value = reinterpret_cast<std::uintptr_t>(block), .bytes = bytes};
  try {
    Result<MarkPtr> mark = noted(work().mark(record));
    if (mark && *mark == nullptr) return pinned_->give(block);
    if (mark) {
      parting.marks.push_back(std::move(*mark));
    } else {
      (mark.error().code() == Errc::capture_unsafe ? parting.is_unmarked : parting.until_shutdown) = true;
    }
  } catch (...) {
    parting.until_shutdown = true;
  }
  keep_for_later(std::move(parting));
}

Result<> CudaBackend::copy_staged(DevicePtr dst, const std::byte* src, std::uint64_t bytes, NativeStream stream,
                                  StreamRecord& record) {
  for (std::uint64_t at = 0; at < bytes; at += kPiece) {
    const std::uint64_t piece = std::min(kPiece, bytes - at);
    reap();
    METRALE_TRY(wait_for_staging());
    void* staged = METRALE_TRY(noted(pinned_->take(piece)));
    std::memcpy(staged, src + at, piece);
    Result<> copied =
        enqueued(stream, driver_.cuMemcpyHtoDAsync_(dst.address + at, staged, piece, stream_of(stream)), "cuMemcpyHtoDAsync");
    part_with_staged(staged, piece, record);
    METRALE_TRY(std::move(copied));
  }
  return {};
}

Result<> CudaBackend::wait_for_staging() {
  for (;;) {
    MarkPtr oldest;
    {
      std::lock_guard lock(partings_mutex_);
      std::uint64_t staged = 0;
      for (const Parting& parting : partings_) {
        if (parting.kind != Parting::Kind::pinned || parting.until_shutdown) continue;
        staged += parting.bytes;
        if (oldest == nullptr && !parting.marks.empty()) oldest = parting.marks.front();
      }
      if (staged < kMostStaged) return {};
    }
    if (oldest == nullptr) return {};
    METRALE_TRY(check(oldest->wait(), "cuEventSynchronize"));
    reap();
  }
}

Result<> CudaBackend::copy_frozen(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream stream) {
  void* kept = METRALE_TRY(noted(pinned_->take(bytes)));
  Frozen* frozen = nullptr;
  try {
    frozen = new Frozen{pinned_, kept};
  } catch (...) {
    pinned_->give(kept);
    throw;
  }
  std::memcpy(kept, src, bytes);
  METRALE_TRY(give_to_capture(stream, frozen, drop_frozen));
  return enqueued(stream, driver_.cuMemcpyHtoDAsync_(dst.address, kept, bytes, stream_of(stream)), "cuMemcpyHtoDAsync");
}

Result<> CudaBackend::do_copy_d2h_async(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  return enqueued(stream, driver_.cuMemcpyDtoHAsync_(dst, src.address, bytes, stream_of(stream)), "cuMemcpyDtoHAsync");
}

Result<> CudaBackend::do_copy_d2d_async(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) {
  METRALE_TRY(context_->make_current());
  return enqueued(stream, driver_.cuMemcpyDtoDAsync_(dst.address, src.address, bytes, stream_of(stream)), "cuMemcpyDtoDAsync");
}

Result<> CudaBackend::do_copy_d2d_2d_async(const Copy2D& r, NativeStream stream) {
  METRALE_TRY(context_->make_current());
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = r.src.address;
  copy.srcPitch = r.src_pitch_bytes;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = r.dst.address;
  copy.dstPitch = r.dst_pitch_bytes;
  copy.WidthInBytes = r.width_bytes;
  copy.Height = r.height;
  // The driver bounds pitches; of a single row neither is looked at.
  if (r.height == 1) copy.srcPitch = copy.dstPitch = r.width_bytes;
  return enqueued(stream, driver_.cuMemcpy2DAsync_(&copy, stream_of(stream)), "cuMemcpy2DAsync");
}

Result<> CudaBackend::do_copy_batch_async(std::span<const CopyDesc> copies, NativeStream stream, bool capturing) {
  const auto host_end = [](const CopyDesc& copy) {
    return copy.host_src != nullptr ? copy.host_src : static_cast<const void*>(copy.host_dst);
  };
  // The driver's batch takes no pageable memory and is no graph node.
  const bool is_one_call = driver_.cuMemcpyBatchAsync_ != nullptr && !capturing && copies.size() > 1 &&
                           std::all_of(copies.begin(), copies.end(), [&](const CopyDesc& copy) {
                             const void* host = host_end(copy);
                             return host == nullptr || is_pinned({static_cast<const std::byte*>(host), copy.bytes});
                           });
  if (!is_one_call) return GpuBackend::do_copy_batch_async(copies, stream, capturing);
  METRALE_TRY(context_->make_current());
  std::vector<CUdeviceptr> ends(2 * copies.size());
  std::vector<std::size_t> sizes(copies.size());
  CUdeviceptr* dsts = ends.data();
  CUdeviceptr* srcs = ends.data() + copies.size();
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const CopyDesc& copy = copies[i];
    dsts[i] = copy.host_dst != nullptr ? reinterpret_cast<std::uintptr_t>(copy.host_dst) : copy.dst.address;
    srcs[i] = copy.host_src != nullptr ? reinterpret_cast<std::uintptr_t>(copy.host_src) : copy.src.address;
    sizes[i] = copy.bytes;
  }
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  std::size_t first = 0;
  return enqueued(stream,
                  driver_.cuMemcpyBatchAsync_(dsts, srcs, sizes.data(), copies.size(), &attributes, &first, 1, stream_of(stream)),
                  "cuMemcpyBatchAsync");
}

Result<> CudaBackend::do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) {
  METRALE_TRY(context_->make_current());
  return enqueued(stream, driver_.cuMemsetD8Async_(dst.address, value, bytes, stream_of(stream)), "cuMemsetD8Async");
}

// ---- between devices ----

Result<> CudaBackend::do_copy_peer_async(DevicePtr dst, GpuBackend& from, DevicePtr src, std::uint64_t bytes, NativeStream stream) {
  auto* peer = dynamic_cast<CudaBackend*>(&from);
  if (peer == nullptr || &peer->driver_ != &driver_) {
    // Another kind of device: through the host.
    std::vector<std::byte> staged(bytes);
    if (Result<> read = from.copy_d2h(staged, src); !read) {
      return Error(read.error().code() == Errc::device_lost ? Errc::invalid_argument : read.error().code(),
                   fmt::format("copy_peer_async: the source cannot be read: {}", read.error().message()));
    }
    return do_copy_h2d_async(dst, staged.data(), bytes, stream, false);
  }
  METRALE_TRY(context_->make_current());
  StreamRecord* record = work().find(stream_of(stream), this);
  if (peer->context_ == context_) {
    METRALE_TRY(do_copy_d2d_async(dst, src, bytes, stream));
  } else {
    METRALE_TRY(reach(*peer->context_));
    METRALE_TRY(enqueued(stream,
                         driver_.cuMemcpyPeerAsync_(dst.address, context_->handle(), src.address, peer->context_->handle(), bytes,
                                                    stream_of(stream)),
                         "cuMemcpyPeerAsync"));
  }
  if (record == nullptr) return {};
  // Where the copy cannot be marked it is waited for: the source's device knows nothing of this stream.
  try {
    Result<MarkPtr> mark = noted(work().mark(*record));
    // In a library's capture it was recorded, and does not run now.
    if (!mark && mark.error().code() == Errc::capture_unsafe) return {};
    if (mark && *mark != nullptr) peer->work().add_mark(peer, std::move(*mark));
    if (mark) return {};
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for the mark
  }
  return check(driver_.cuStreamSynchronize_(stream_of(stream)), "cuStreamSynchronize");
}

Result<> CudaBackend::reach(Context& peer) {
  std::lock_guard lock(peers_mutex_);
  if (std::find(peers_.begin(), peers_.end(), peer.handle()) != peers_.end()) return {};
  int can = 0;
  METRALE_TRY(check(driver_.cuDeviceCanAccessPeer_(&can, context_->device(), peer.device()), "cuDeviceCanAccessPeer"));
  // Without access the driver stages the copy.
  if (can != 0) {
    const CUresult code = driver_.cuCtxEnablePeerAccess_(peer.handle(), 0);
    if (code != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED && code != CUDA_ERROR_TOO_MANY_PEERS &&
        code != CUDA_ERROR_PEER_ACCESS_UNSUPPORTED) {
      METRALE_TRY(check(code, "cuCtxEnablePeerAccess"));
    }
  }
  peers_.push_back(peer.handle());
  return {};
}

}  // namespace metrale::cuda
