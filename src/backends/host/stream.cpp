// SPDX-License-Identifier: Apache-2.0
#include "backends/host/stream.h"

#include <algorithm>

#include "backends/host/host_backend.h"
#include "backends/host/status.h"

namespace metrale::host {

namespace {

// A worker that stays a little longer saves the next launch a wake-up; a waiter that spins longer takes the worker's core.
constexpr std::chrono::microseconds kWorkerSpin{20};
constexpr std::chrono::microseconds kWaiterSpin{2};

}  // namespace

Result<> Stream::ensure_worker() {
  if (!has_worker_) {
    METRALE_TRY(device_.workers.serve(*this));
    has_worker_ = true;
  }
  news_.store(true, std::memory_order_release);
  return {};
}

Result<> Stream::release(Ticket ticket) {
  if (released_.load(std::memory_order_acquire) >= ticket) return {};
  std::lock_guard lock(mutex_);
  if (released_.load(std::memory_order_relaxed) >= ticket) return {};
  released_.store(ticket, std::memory_order_release);
  if (is_runnable()) METRALE_TRY(ensure_worker());
  return {};
}

void Stream::finish_one() noexcept {
  completed_.store(completed_.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
  if (waiters_.load(std::memory_order_seq_cst) != 0) {
    {
      std::lock_guard lock(wait_mutex_);
    }
    completion_.notify_all();
  }
}

void Stream::wait(Ticket ticket) {
  if (spin_until([&] { return is_done(ticket); }, kWaiterSpin)) return;
  std::unique_lock lock(wait_mutex_);
  waiters_.fetch_add(1, std::memory_order_seq_cst);
  completion_.wait(lock, [&] { return is_done(ticket); });
  waiters_.fetch_sub(1, std::memory_order_relaxed);
}

bool Stream::wait_until(Ticket ticket, std::chrono::steady_clock::time_point deadline) {
  if (is_done(ticket)) return true;
  std::unique_lock lock(wait_mutex_);
  waiters_.fetch_add(1, std::memory_order_seq_cst);
  const bool done = completion_.wait_until(lock, deadline, [&] { return is_done(ticket); });
  waiters_.fetch_sub(1, std::memory_order_relaxed);
  return done;
}

void Stream::run(Scratch& scratch) {
  std::unique_lock lock(mutex_);
  for (;;) {
    news_.store(false, std::memory_order_relaxed);
    if (!is_runnable()) {
      lock.unlock();
      device_.reap();
      const bool more = spin_until([this] { return news_.load(std::memory_order_acquire); }, kWorkerSpin);
      lock.lock();
      if (more || is_runnable()) continue;
      has_worker_ = false;
      return;
    }
    if (cursor_.get() == nullptr) {
      running_.clear();
      running_.swap(pending_);
      cursor_ = WorkBuffer::Cursor(running_);
    }
    lock.unlock();
    while (Work* work = cursor_.get()) {
      if (completed_.load(std::memory_order_relaxed) >= released_.load(std::memory_order_acquire)) break;
      device_.execute(*work, scratch);
      cursor_.advance();
      WorkBuffer::destroy(*work);
      finish_one();
    }
    if (cursor_.get() == nullptr) running_.forget();
    lock.lock();
  }
}

// ---- hooks ----

Result<NativeStream> HostBackend::do_create_stream(int) {
  METRALE_TRY(device().alive());
  return guarded("create a stream", [&]() -> Result<NativeStream> { return native(device().make_stream()); });
}

Result<> HostBackend::do_destroy_stream(NativeStream stream) {
  METRALE_TRY(stream_of(stream).release(stream_of(stream).tail()));
  device().drop_stream(stream_of(stream));
  return {};
}

Result<NativeStream> HostBackend::do_wrap_stream(std::uint64_t value) {
  METRALE_TRY(device().alive());
  if (!device().owns(reinterpret_cast<const Stream*>(static_cast<std::uintptr_t>(value)))) {
    return Error(Errc::invalid_argument,
                 "wrap_stream: the host backend can only wrap what its own native_stream gave for a live stream");
  }
  return NativeStream{value};
}

Result<> HostBackend::do_synchronize(NativeStream stream) {
  METRALE_TRY(stream_of(stream).synchronize());
  device().reap();
  return device().alive();
}

Result<> HostBackend::do_synchronize_for(NativeStream stream, std::chrono::nanoseconds timeout) {
  const auto now = std::chrono::steady_clock::now();
  const auto longest = std::chrono::steady_clock::time_point::max() - now;
  Stream& s = stream_of(stream);
  const Ticket ticket = s.tail();
  METRALE_TRY(s.release(ticket));
  const bool done = s.wait_until(ticket, now + std::min<std::chrono::nanoseconds>(timeout, longest));
  METRALE_TRY(device().alive());
  if (!done) return Error(Errc::timeout, "synchronize_for: the stream still has work; wait again or longer");
  return {};
}

Result<> HostBackend::do_synchronize_device() {
  METRALE_TRY(device().synchronize());
  device().reap();
  return device().alive();
}

Result<bool> HostBackend::do_query(NativeStream stream) {
  METRALE_TRY(device().alive());
  Stream& s = stream_of(stream);
  const Ticket ticket = s.tail();
  METRALE_TRY(s.release(ticket));
  return s.is_done(ticket);
}

Result<> HostBackend::do_enqueue_host(NativeStream stream, std::function<void()> fn) {
  METRALE_TRY(device().alive());
  METRALE_TRY(stream_of(stream).submit([&](WorkBuffer& work) { work.append<CallWork>().fn = std::move(fn); }));
  return {};
}

}  // namespace metrale::host
