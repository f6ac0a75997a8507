// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <thread>

#include "backends/cuda/cuda_backend.h"

namespace metrale::cuda {

namespace {

constexpr std::chrono::microseconds kSpin{50};
constexpr std::chrono::microseconds kFirstSleep{20};
constexpr std::chrono::microseconds kLongestSleep{1000};

}  // namespace

Result<NativeStream> CudaBackend::do_create_stream(int priority) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  // The driver counts the other way round.
  const int theirs = std::clamp(priority == INT_MIN ? INT_MAX : -priority, greatest_priority_, least_priority_);
  CUstream stream = nullptr;
  METRALE_TRY(check(driver_.cuStreamCreateWithPriority_(&stream, CU_STREAM_NON_BLOCKING, theirs), "cuStreamCreateWithPriority"));
  try {
    work().add(stream, this, false);
  } catch (...) {
    static_cast<void>(driver_.cuStreamDestroy_(stream));
    throw;
  }
  return NativeStream{reinterpret_cast<std::uintptr_t>(stream)};
}

Result<> CudaBackend::do_destroy_stream(NativeStream stream) {
  return part_in_context({.kind = Parting::Kind::stream, .value = stream.value}, [&](const Parting& parting) {
    if (StreamRecord* record = work().find(stream_of(stream), this)) {
      std::lock_guard lock(record->staging.mutex);
      close_staging(*record);
    }
    leave_stream(stream, [&](bool anyway) { return work().remove(stream_of(stream), this, anyway); });
    return give_back(parting);
  });
}

Result<NativeStream> CudaBackend::do_wrap_stream(std::uint64_t native) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  const NativeStream stream{native};
  if (stream_of(stream) == CU_STREAM_LEGACY || stream_of(stream) == CU_STREAM_PER_THREAD) {
    return Error(Errc::invalid_argument,
                 "wrap_stream of one of the driver's default streams: make a stream of its own and wrap that");
  }
  CUcontext theirs = nullptr;
  METRALE_TRY(check(driver_.cuStreamGetCtx_(stream_of(stream), &theirs), "cuStreamGetCtx"));
  if (theirs != context_->handle()) {
    return Error(
        Errc::invalid_argument,
        fmt::format("wrap_stream of {:#x}: the stream belongs to another context than the primary one of {}", native, device_key_));
  }
  work().add(stream_of(stream), this, true);
  return stream;
}

void CudaBackend::do_unwrap_stream(NativeStream stream) noexcept {
  if (!context_->make_current()) return;
  const OutsideCapture outside(driver_);
  try {
    if (StreamRecord* record = work().find(stream_of(stream), this)) {
      std::lock_guard lock(record->staging.mutex);
      close_staging(*record);
    }
    leave_stream(stream, [&](bool anyway) { return work().unwrap(stream_of(stream), this, anyway); });
  } catch (...) {  // NOLINT(bugprone-empty-catch): without memory the stream stays known
  }
}

Result<> CudaBackend::do_synchronize(NativeStream stream) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  StreamRecord* record = work().find(stream_of(stream), this);
  const std::uint64_t stamp = record == nullptr ? 0 : record->enqueued.load(std::memory_order_acquire);
  METRALE_TRY(check(driver_.cuStreamSynchronize_(stream_of(stream)), "cuStreamSynchronize"));
  if (record != nullptr) record->note_done(stamp);
  reap();
  return {};
}

Result<bool> CudaBackend::do_query(NativeStream stream) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  StreamRecord* record = work().find(stream_of(stream), this);
  const std::uint64_t stamp = record == nullptr ? 0 : record->enqueued.load(std::memory_order_acquire);
  const CUresult code = driver_.cuStreamQuery_(stream_of(stream));
  if (code == CUDA_ERROR_NOT_READY) return false;
  METRALE_TRY(check(code, "cuStreamQuery"));
  if (record != nullptr) record->note_done(stamp);
  return true;
}

Result<> CudaBackend::do_synchronize_for(NativeStream stream, std::chrono::nanoseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  for (auto pause = kFirstSleep;;) {
    // Asked once more after the time is over: a sleep may have taken all of it.
    const Clock::duration waited = Clock::now() - begin;
    if (METRALE_TRY(do_query(stream))) break;
    if (waited >= timeout) {
      return Error(Errc::timeout, fmt::format("the stream still has work after {} ns; it goes on", timeout.count()));
    }
    if (waited < kSpin) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, timeout - waited));
    pause = std::min(2 * pause, kLongestSleep);
  }
  reap();
  return {};
}

// Stream by stream, since a wait for the whole context would break captures that other threads hold.
Result<> CudaBackend::do_wait_for_earlier_work() {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  for (const MarkPtr& mark : METRALE_TRY(noted(work().marks(this)))) METRALE_TRY(check(mark->wait(), "cuEventSynchronize"));
  reap();
  return {};
}

// ---- work of other libraries ----

Result<> CudaBackend::do_enqueue_native(NativeStream stream, NativeWork work) {
  METRALE_TRY(context_->make_current());
  Result<> answer = work(stream.value);
  this->work().note(stream_of(stream), this);  // a failed call may have enqueued some of it
  if (answer) [[likely]]
    return answer;
  // Libraries have codes of their own for a lost device; the driver's is the one that counts. Nothing may be asked of a captured
  // stream, and nothing of it ran.
  if (const Result<bool> captured = this->work().is_captured(stream_of(stream)); !captured || *captured) return answer;
  const OutsideCapture outside(driver_);
  const CUresult code = driver_.cuStreamQuery_(stream_of(stream));
  if (is_sticky(code)) return context_->error(code, "cuStreamQuery").with_note(answer.error().message());
  return answer;
}

// ---- host functions ----

namespace {

void CUDA_CB run_once(void* ticket) { HostCalls::run_once(ticket); }
void CUDA_CB run_again(void* call) { HostCalls::run_again(call); }
void CUDA_CB drop_call(void* call) { delete static_cast<HostCall*>(call); }

}  // namespace

Result<> CudaBackend::do_enqueue_host(NativeStream stream, std::function<void()> fn) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  if (METRALE_TRY(noted(work().is_captured(stream_of(stream))))) {
    auto* call = new HostCall{std::move(fn)};
    METRALE_TRY(give_to_capture(stream, call, drop_call));
    return enqueued(stream, driver_.cuLaunchHostFunc_(stream_of(stream), run_again, call), "cuLaunchHostFunc");
  }
  HostCalls::Ticket* ticket = host_calls_->add(std::move(fn));
  Result<> launched = enqueued(stream, driver_.cuLaunchHostFunc_(stream_of(stream), run_once, ticket), "cuLaunchHostFunc");
  if (!launched) host_calls_->drop(ticket);
  return launched;
}

}  // namespace metrale::cuda
