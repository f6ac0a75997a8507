// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "backends/cuda/cuda_backend.h"

namespace metrale::cuda {

Result<NativeEvent> CudaBackend::do_create_event(bool timed) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  CUevent event = nullptr;
  METRALE_TRY(check(driver_.cuEventCreate_(&event, timed ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING), "cuEventCreate"));
  return NativeEvent{reinterpret_cast<std::uintptr_t>(event)};
}

// The driver keeps an event whose record is still to come.
Result<> CudaBackend::do_destroy_event(NativeEvent event) {
  return part_in_context({.kind = Parting::Kind::event, .value = event.value},
                         [&](const Parting& parting) { return give_back(parting); });
}

Result<> CudaBackend::do_record_event(NativeEvent event, NativeStream stream) {
  METRALE_TRY(context_->make_current());
  METRALE_TRY(enqueued(stream, driver_.cuEventRecord_(event_of(event), stream_of(stream)), "cuEventRecord"));
  if (num_captures_.load(std::memory_order_acquire) != 0) [[unlikely]]
    joins_.recorded(event_of(event), stream_of(stream), METRALE_TRY(noted(work().capture_of(stream_of(stream)))));
  return {};
}

Result<> CudaBackend::do_stream_wait_event(NativeStream stream, NativeEvent event) {
  METRALE_TRY(context_->make_current());
  // Called under the lock of `work()`, which the context's own check takes to name kernels.
  const auto wait = [&]() -> Result<> {
    const CUresult code = driver_.cuStreamWaitEvent_(stream_of(stream), event_of(event), CU_EVENT_WAIT_DEFAULT);
    work().note(stream_of(stream), this);
    return cuda::check(driver_, code, "cuStreamWaitEvent");
  };
  StreamRecord* record = work().find(stream_of(stream), this);
  // An event recorded in a capture takes the stream into it.
  if (record != nullptr && num_captures_.load(std::memory_order_acquire) != 0) [[unlikely]]
    return noted(work().capturing(*record, [&]() -> Result<> {
      const std::uint64_t before = METRALE_TRY(work().capture_of_locked(stream_of(stream)));
      METRALE_TRY(wait());
      if (const std::uint64_t id = METRALE_TRY(work().capture_of_locked(stream_of(stream))); id != 0) {
        joins_.waited(event_of(event), stream_of(stream), id, before != id);
      }
      return {};
    }));
  return noted(wait());
}

Result<> CudaBackend::do_event_synchronize(NativeEvent event) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  return check(driver_.cuEventSynchronize_(event_of(event)), "cuEventSynchronize");
}

Result<bool> CudaBackend::do_event_query(NativeEvent event) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  const CUresult code = driver_.cuEventQuery_(event_of(event));
  if (code == CUDA_ERROR_NOT_READY) return false;
  METRALE_TRY(check(code, "cuEventQuery"));
  return true;
}

Result<std::int64_t> CudaBackend::do_event_elapsed_ns(NativeEvent start, NativeEvent end) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  float milliseconds = 0;
  const CUresult code = driver_.cuEventElapsedTime_(&milliseconds, event_of(start), event_of(end));
  if (code == CUDA_ERROR_NOT_READY) return Error(Errc::busy, "event_elapsed_ns: the work before the events is not done");
  METRALE_TRY(check(code, "cuEventElapsedTime"));
  return std::llround(static_cast<double>(milliseconds) * 1e6);
}

}  // namespace metrale::cuda
