// SPDX-License-Identifier: Apache-2.0
//
// GpuBackend: work of other libraries on its streams.
#include "core/face_state.h"

namespace metrale {

using detail::FaceState;
using detail::StreamRecord;

Result<> GpuBackend::check_memory(std::string_view what, DevicePtr ptr, std::uint64_t bytes, Site site) const {
  return FaceState::caught("check_memory", site, [&]() -> Result<> { return face_->check_device(what, ptr, bytes, site); });
}

Result<> GpuBackend::enqueue_native(std::string_view what, StreamHandle stream, std::span<const NativeUse> uses, NativeWork work,
                                    Site site) {
  FaceState& f = *face_;
  detail::Recording recording;
  const OpRecord op{.op = Op::enqueue_native, .num_args = static_cast<std::uint32_t>(uses.size()), .stream = stream, .site = site};
  return f.run(
      op,
      [&]() -> Result<> {
        StreamRecord* record = METRALE_TRY(f.stream_for_work(op.op, stream, site));
        for (const NativeUse& use : uses) METRALE_TRY(f.check_device(use.what, use.ptr, use.bytes, site));
        recording = f.claim_place();
        if (Result<> enqueued = do_enqueue_native(record->native, work); !enqueued) {
          return Error(std::move(enqueued).error()).with_note(std::string(what));
        }
        if (record->capture.load(std::memory_order_acquire) != 0) [[unlikely]] {
          for (const NativeUse& use : uses) f.name_device(*record, use.ptr);
        }
        return {};
      },
      &recording);
}

}  // namespace metrale
