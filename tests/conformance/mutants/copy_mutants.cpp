// SPDX-License-Identifier: Apache-2.0
#include "conformance/mutants/host_mutant.h"

namespace metrale::conformance {
namespace {

class CopyH2dIsOneByteShort : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_h2d(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream stream) override {
    return HostMutant::do_copy_h2d(dst, src, bytes - 1, stream);
  }
};

class CopyD2dIsOneByteLong : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_d2d(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) override {
    return HostMutant::do_copy_d2d(dst, src, bytes + 1, stream);
  }
};

class CopyH2dIsUnordered : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_h2d(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream) override {
    std::memcpy(bytes_at(dst), src, bytes);
    return {};
  }
};

class CopyD2hIsUnordered : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_d2h(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream) override {
    std::memcpy(dst, bytes_at(src), bytes);
    return {};
  }
};

class CopyD2dReturnsEarly : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_d2d(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) override {
    return HostMutant::do_copy_d2d_async(dst, src, bytes, stream);
  }
};

class CopyD2hWaitsForTheWholeDevice : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_d2h(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) override {
    METRALE_TRY(HostMutant::do_synchronize_device());
    return HostMutant::do_copy_d2h(dst, src, bytes, stream);
  }
};

class D2hOnStreamComesAfterTheDefaultStreamOnly : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_d2h_on_stream(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream) override {
    return HostMutant::do_copy_d2h_on_stream(dst, src, bytes, first_stream());
  }
};

class D2hOnStreamWaitsForTheWholeDevice : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_d2h_on_stream(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) override {
    METRALE_TRY(HostMutant::do_synchronize_device());
    return HostMutant::do_copy_d2h_on_stream(dst, src, bytes, stream);
  }
};

class StagingIsSkipped : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_h2d_async(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream stream, bool) override {
    return HostMutant::do_copy_h2d_async(dst, src, bytes, stream, true);
  }
};

/// As a driver that reads pinned memory when the copy runs.
class PinnedSourcesAreReadLate : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_h2d_async(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream stream, bool retained) override {
    const bool pinned = is_pinned({static_cast<const std::byte*>(src), bytes});
    return HostMutant::do_copy_h2d_async(dst, src, bytes, stream, retained || pinned);
  }
};

class H2dAsyncIsUnordered : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_h2d_async(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream, bool) override {
    std::memcpy(bytes_at(dst), src, bytes);
    return {};
  }
};

class RetainedCopiesWait : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_h2d_async(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream stream, bool retained) override {
    METRALE_TRY(HostMutant::do_copy_h2d_async(dst, src, bytes, stream, retained));
    return retained ? HostMutant::do_synchronize(stream) : Result<>();
  }
};

class D2hAsyncRunsInTheCall : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_d2h_async(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream) override {
    std::memcpy(dst, bytes_at(src), bytes);
    return {};
  }
};

class D2hAsyncIsDropped : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_d2h_async(void*, DevicePtr, std::uint64_t, NativeStream) override { return {}; }
};

class D2dAsyncIsUnordered : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_d2d_async(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream) override {
    std::memmove(bytes_at(dst), bytes_at(src), bytes);
    return {};
  }
};

class PitchesAreSwapped : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_d2d_2d_async(const Copy2D& rectangle, NativeStream stream) override {
    Copy2D swapped = rectangle;
    std::swap(swapped.dst_pitch_bytes, swapped.src_pitch_bytes);
    return HostMutant::do_copy_d2d_2d_async(swapped, stream);
  }
};

class LastRowIsDropped : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_d2d_2d_async(const Copy2D& rectangle, NativeStream stream) override {
    Copy2D shorter = rectangle;
    --shorter.height;
    return HostMutant::do_copy_d2d_2d_async(shorter, stream);
  }
};

class BatchDropsItsLastCopy : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_batch_async(std::span<const CopyDesc> copies, NativeStream stream, bool capturing_now) override {
    return HostMutant::do_copy_batch_async(copies.first(copies.size() - 1), stream, capturing_now);
  }
};

class BatchRunsInTheCall : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_batch_async(std::span<const CopyDesc> copies, NativeStream, bool) override {
    for (const CopyDesc& copy : copies) {
      void* dst = copy.host_dst != nullptr ? copy.host_dst : bytes_at(copy.dst);
      std::memmove(dst, copy.host_src != nullptr ? copy.host_src : bytes_at(copy.src), copy.bytes);
    }
    return {};
  }
};

class PeerCopiesSucceedAndDoNothing : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_peer_async(DevicePtr, GpuBackend&, DevicePtr, std::uint64_t, NativeStream) override { return {}; }
};

class MemsetReturnsEarly : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_memset(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) override {
    return HostMutant::do_memset_async(dst, value, bytes, stream);
  }
};

class MemsetIsOneByteLong : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_memset(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) override {
    // Inside a block only: past its end the heap would notice before the case does.
    const bool is_inside = dst.address % kDeviceAlignment != 0;
    return HostMutant::do_memset(dst, value, is_inside ? bytes + 1 : bytes, stream);
  }
};

class MemsetWaitsForTheWholeDevice : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_memset(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) override {
    METRALE_TRY(HostMutant::do_synchronize_device());
    return HostMutant::do_memset(dst, value, bytes, stream);
  }
};

class MemsetAsyncIsUnordered : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream) override {
    std::memset(bytes_at(dst), value, bytes);
    return {};
  }
};

}  // namespace

std::vector<Mutant> copy_mutants() {
  return {
      host_mutant<CopyH2dIsOneByteShort>("copy_h2d_is_one_byte_short", "Copy.RoundTripsEveryByte"),
      host_mutant<CopyD2dIsOneByteLong>("copy_d2d_is_one_byte_long", "Copy.D2dCopiesEveryByteAndNoMore"),
      host_mutant<CopyH2dIsUnordered>("copy_h2d_is_unordered", "Copy.H2dIsOrderedAfterTheDefaultStream"),
      host_mutant<CopyD2hIsUnordered>("copy_d2h_is_unordered", "Copy.D2hIsOrderedAfterTheDefaultStream"),
      host_mutant<CopyD2dReturnsEarly>("copy_d2d_returns_early", "Copy.D2dIsOrderedAfterTheDefaultStreamAndReturnsWhenDone"),
      host_mutant<CopyD2hWaitsForTheWholeDevice>("copy_d2h_waits_for_the_whole_device",
                                                 "Copy.BlockingFormsDoNotWaitForOtherStreams"),
      host_mutant<D2hOnStreamComesAfterTheDefaultStreamOnly>("d2h_on_stream_comes_after_the_default_stream_only",
                                                             "Copy.D2hOnStreamIsOrderedAfterItsStream"),
      host_mutant<D2hOnStreamWaitsForTheWholeDevice>("d2h_on_stream_waits_for_the_whole_device",
                                                     "Copy.D2hOnStreamDoesNotWaitForOtherStreams"),
      host_mutant<StagingIsSkipped>("staging_is_skipped", "Copy.H2dAsyncLetsAPageableSourceBeReusedAtReturn"),
      host_mutant<StagingIsSkipped>("captured_sources_are_not_frozen", "Capture.FreezesTheBytesOfCopiesToTheDevice"),
      host_mutant<PinnedSourcesAreReadLate>("pinned_sources_are_read_late", "Copy.H2dAsyncLetsAPinnedSourceBeReusedAtReturn"),
      host_mutant<H2dAsyncIsUnordered>("h2d_async_is_unordered", "Copy.H2dAsyncIsOrderedOnItsStream"),
      host_mutant<RetainedCopiesWait>("retained_copies_wait", "Copy.H2dAsyncRetainedAddsNoWait"),
      host_mutant<D2hAsyncRunsInTheCall>("d2h_async_runs_in_the_call",
                                         "Copy.D2hAsyncAddsNoWaitAndIsValidAfterTheStreamsSynchronisation"),
      host_mutant<D2hAsyncIsDropped>("d2h_async_is_dropped", "Copy.D2hAsyncTakesPageableMemoryToo"),
      host_mutant<D2dAsyncIsUnordered>("d2d_async_is_unordered", "Copy.D2dAsyncIsOrderedOnItsStream"),
      host_mutant<PitchesAreSwapped>("pitches_are_swapped", "CopyRectangle.CopiesTheRectangleAndNothingElse"),
      host_mutant<LastRowIsDropped>("last_row_is_dropped", "CopyRectangle.NeedsTheLastRowInsideNotItsPitch"),
      host_mutant<BatchDropsItsLastCopy>("batch_drops_its_last_copy", "CopyBatch.MakesEveryCopyOfItsList"),
      host_mutant<BatchRunsInTheCall>("batch_runs_in_the_call", "CopyBatch.IsOrderedOnItsStream"),
      host_mutant<PeerCopiesSucceedAndDoNothing>("peer_copies_succeed_and_do_nothing", "CopyPeer.CopiesFromAnotherDevice"),
      host_mutant<MemsetReturnsEarly>("memset_returns_early", "Memset.IsOrderedAfterTheDefaultStream"),
      host_mutant<MemsetIsOneByteLong>("memset_is_one_byte_long", "Memset.FillsExactlyItsRange"),
      host_mutant<MemsetWaitsForTheWholeDevice>("memset_waits_for_the_whole_device", "Memset.DoesNotWaitForOtherStreams"),
      host_mutant<MemsetAsyncIsUnordered>("memset_async_is_unordered", "Memset.AsyncIsOrderedOnItsStream"),
  };
}

}  // namespace metrale::conformance
