// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/work.h"

#include <algorithm>
#include <utility>

#include "backends/cuda/status.h"

namespace metrale::cuda {

// ---- events and marks ----

Result<CUevent> EventPool::take() {
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      const CUevent event = free_.back();
      free_.pop_back();
      return event;
    }
    free_.reserve(++num_made_);  // so that `give` needs no memory
  }
  CUevent event = nullptr;
  METRALE_TRY(check(driver_, driver_.cuEventCreate_(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate"));
  return event;
}

void EventPool::give(CUevent event) noexcept {
  if (event == nullptr) return;
  std::lock_guard lock(mutex_);
  if (is_closed_) return;
  try {
    free_.push_back(event);
  } catch (...) {
    static_cast<void>(driver_.cuEventDestroy_(event));
  }
}

void EventPool::close() noexcept {
  std::lock_guard lock(mutex_);
  for (const CUevent event : free_) {
    static_cast<void>(give_back_insisting([&] { return driver_.cuEventDestroy_(event); }));
  }
  free_.clear();
  is_closed_ = true;
}

Result<> Mark::record(CUstream stream) {
  event_ = METRALE_TRY(events_->take());
  return check(events_->driver(), events_->driver().cuEventRecord_(event_, stream), "cuEventRecord");
}

bool Mark::is_done() noexcept {
  if (done_.load(std::memory_order_acquire)) return true;
  if (events_->driver().cuEventQuery_(event_) == CUDA_ERROR_NOT_READY) return false;
  done_.store(true, std::memory_order_release);
  return true;
}

CUresult Mark::wait() noexcept {
  if (done_.load(std::memory_order_acquire)) return CUDA_SUCCESS;
  const CUresult code = events_->driver().cuEventSynchronize_(event_);
  if (code == CUDA_SUCCESS) done_.store(true, std::memory_order_release);
  return code;
}

// ---- streams ----

void Work::insert(Table& table, StreamRecord& record) {
  std::size_t i = slot_of(record.stream.load(std::memory_order_relaxed), table);
  for (;; i = (i + 1) & table.mask) {
    const StreamRecord* held = table.slots[i].load(std::memory_order_relaxed);
    if (held == nullptr || held->slot != i || held->stream.load(std::memory_order_relaxed) == nullptr) break;
  }
  record.slot = i;
  table.slots[i].store(&record, std::memory_order_release);
}

StreamRecord& Work::add(CUstream stream, const void* owner, bool is_foreign) {
  std::lock_guard lock(mutex_);
  if (StreamRecord* known = find(stream, owner)) {
    // Where the first of that name was destroyed this is another, and its stamps tell of both.
    if (std::exchange(known->is_gone, false)) {
      known->is_foreign = is_foreign;
      known->is_shared = false;
    }
    ++known->num_wraps;
    return *known;
  }
  live_.reserve(live_.size() + 1);
  spare_.reserve(records_.size() + 1);  // so that `remove` needs no memory
  orphans_.reserve(orphans_.size() + live_.size() + 1);
  if (2 * (live_.size() + 1) > tables_.back().mask + 1) {
    Table& larger = tables_.emplace_back(tables_.back().bits + 1);
    for (StreamRecord* record : live_) insert(larger, *record);
    table_.store(&larger, std::memory_order_release);
  }
  StreamRecord* record = nullptr;
  if (spare_.empty()) {
    record = &records_.emplace_back();
  } else {
    record = spare_.back();
    spare_.pop_back();
  }
  record->owner.store(owner, std::memory_order_relaxed);
  record->is_foreign = is_foreign;
  record->is_shared = false;
  record->is_gone = false;
  record->num_wraps = is_foreign ? 1 : 0;
  record->mark.reset();
  record->mark_at = 0;
  record->capture = 0;
  record->before_capture.reset();
  record->staging.block = nullptr;
  record->staging.used = 0;
  record->last_kernel.store(nullptr, std::memory_order_relaxed);
  record->done.store(record->enqueued.load());
  record->stream.store(stream, std::memory_order_release);
  live_.push_back(record);
  insert(tables_.back(), *record);
  return *record;
}

void Work::remove_locked(StreamRecord& record) {
  record.stream.store(nullptr, std::memory_order_release);
  record.mark.reset();
  record.before_capture.reset();
  std::erase(live_, &record);
  spare_.push_back(&record);
}

Result<> Work::keep_end(StreamRecord& record) {
  if (record.is_gone) return {};
  const void* owner = record.owner.load(std::memory_order_relaxed);
  Result<MarkPtr> end = mark_locked(record, Stamps::ignored);
  if (end && *end) orphans_.push_back({owner, std::move(*end)});
  if (record.before_capture && !record.before_capture->is_done()) orphans_.push_back({owner, std::move(record.before_capture)});
  METRALE_TRY(std::move(end));
  return {};
}

Result<> Work::remove(CUstream stream, const void* owner, bool anyway) {
  std::lock_guard lock(mutex_);
  StreamRecord* record = find(stream, owner);
  if (record == nullptr) return {};
  for (StreamRecord* wrap : live_) {
    if (wrap->stream.load(std::memory_order_relaxed) != stream) continue;
    if (Result<> kept = keep_end(*wrap); !kept && !anyway) return kept;
  }
  for (StreamRecord* wrap : live_) {
    if (wrap->stream.load(std::memory_order_relaxed) != stream) continue;
    wrap->is_gone = true;
    wrap->mark.reset();
    wrap->before_capture.reset();
  }
  remove_locked(*record);
  return {};
}

Result<> Work::unwrap(CUstream stream, const void* owner, bool anyway) {
  std::lock_guard lock(mutex_);
  StreamRecord* record = find(stream, owner);
  if (record == nullptr || record->num_wraps == 0) return {};
  if (record->is_foreign && record->num_wraps == 1) {
    // What we enqueued may still run. Its maker may destroy the stream from now on, so this is the last moment to ask.
    if (Result<> kept = keep_end(*record); !kept && !anyway) return kept;
  }
  if (--record->num_wraps == 0 && record->is_foreign) remove_locked(*record);
  return {};
}

void Work::share(CUstream stream, const void* owner) noexcept {
  std::lock_guard lock(mutex_);
  if (StreamRecord* record = find(stream, owner)) record->is_shared = true;
}

void Work::forget(const void* owner) {
  std::lock_guard lock(mutex_);
  std::erase_if(orphans_, [&](const Orphan& orphan) { return orphan.owner == owner; });
  for (std::size_t i = live_.size(); i-- > 0;) {
    if (live_[i]->owner.load(std::memory_order_relaxed) == owner) remove_locked(*live_[i]);
  }
}

Result<bool> Work::is_captured(CUstream stream) const {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  METRALE_TRY(check(driver_, driver_.cuStreamIsCapturing_(stream, &status), "cuStreamIsCapturing"));
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

bool Work::looks_idle() {
  std::lock_guard lock(mutex_);
  if (!orphans_.empty()) {
    drop_done_orphans();
    if (!orphans_.empty()) return false;
  }
  return std::all_of(live_.begin(), live_.end(),
                     [](const StreamRecord* r) { return r->is_gone || (!r->is_foreign && r->looks_idle()); });
}

bool Work::is_idle_after(std::size_t most_queries) {
  std::lock_guard lock(mutex_);
  drop_done_orphans();
  if (!orphans_.empty()) return false;
  const auto is_certain = [](const StreamRecord* r) { return r->is_gone || (!r->is_foreign && !r->is_shared && r->looks_idle()); };
  const auto certain = static_cast<std::size_t>(std::count_if(live_.begin(), live_.end(), is_certain));
  if (live_.size() - certain > most_queries) return false;
  return std::all_of(live_.begin(), live_.end(),
                     [&](StreamRecord* r) { return is_certain(r) || is_idle_locked(*r, Stamps::ignored); });
}

bool Work::is_idle() {
  std::lock_guard lock(mutex_);
  drop_done_orphans();
  return orphans_.empty() &&
         std::all_of(live_.begin(), live_.end(), [&](StreamRecord* r) { return is_idle_locked(*r, Stamps::trusted); });
}

Result<std::uint64_t> Work::capture_of(CUstream stream) {
  std::lock_guard lock(mutex_);
  return capture_of_locked(stream);
}

Result<std::uint64_t> Work::capture_of_locked(CUstream stream) const {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  METRALE_TRY(check(driver_, driver_.cuStreamGetCaptureInfo_(stream, &status, &id, nullptr, nullptr, nullptr, nullptr),
                    "cuStreamGetCaptureInfo"));
  return status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? std::uint64_t{id} : 0;
}

CUresult Work::end_capture(CUstream stream, CUgraph* graph) {
  std::lock_guard lock(mutex_);
  const auto origin = std::find_if(live_.begin(), live_.end(), [&](const StreamRecord* record) {
    return record->stream.load(std::memory_order_relaxed) == stream && !record->is_gone;
  });
  const std::uint64_t capture = origin == live_.end() ? 0 : (*origin)->capture;
  const CUresult code = driver_.cuStreamEndCapture_(stream, graph);
  if (capture == 0 || (code != CUDA_SUCCESS && is_captured(stream).value_or(true))) return code;
  for (StreamRecord* record : live_) {
    if (record->capture != capture) continue;
    record->capture = 0;
    record->before_capture.reset();
  }
  return code;
}

Result<MarkPtr> Work::before_capture(const StreamRecord& record) {
  if (record.capture == 0) {
    return Error(
        Errc::capture_unsafe,
        "a library captures a stream that is used here: nobody can tell what runs on it from before until that capture ends");
  }
  return record.before_capture == nullptr || record.before_capture->is_done() ? MarkPtr() : record.before_capture;
}

bool Work::is_idle_locked(StreamRecord& record, Stamps stamps) {
  if (record.is_gone) return true;
  const std::uint64_t stamp = record.enqueued.load(std::memory_order_acquire);
  if (stamps == Stamps::trusted && !record.is_foreign && record.done.load(std::memory_order_acquire) == stamp) return true;
  const CUstream stream = record.stream.load(std::memory_order_relaxed);
  // Nothing may be asked of a captured stream; what it records does not run.
  const Result<bool> captured = is_captured(stream);
  if (!captured) return false;
  if (*captured) {
    const Result<MarkPtr> before = before_capture(record);
    return before && *before == nullptr;
  }
  record.capture = 0;
  const CUresult code = driver_.cuStreamQuery_(stream);
  if (code == CUDA_SUCCESS) record.note_done(stamp);
  return code != CUDA_ERROR_NOT_READY;  // a lost context answers at once, whatever it is asked next
}

Result<MarkPtr> Work::mark_locked(StreamRecord& record, Stamps stamps) {
  if (record.is_gone) return MarkPtr();
  const std::uint64_t stamp = record.enqueued.load(std::memory_order_acquire);
  const bool trusted = stamps == Stamps::trusted && !record.is_foreign;
  if (trusted && record.done.load(std::memory_order_acquire) == stamp) return MarkPtr();
  const CUstream stream = record.stream.load(std::memory_order_relaxed);
  if (METRALE_TRY(is_captured(stream))) return before_capture(record);
  record.capture = 0;
  if (trusted && record.mark && record.mark_at == stamp) {
    if (!record.mark->is_done()) return record.mark;
    record.note_done(stamp);
    return MarkPtr();
  }
  if (is_idle_locked(record, stamps)) return MarkPtr();
  auto mark = std::make_shared<Mark>(events_);
  METRALE_TRY(mark->record(stream));
  record.mark = mark;
  record.mark_at = stamp;
  return mark;
}

Result<MarkPtr> Work::mark(StreamRecord& record) {
  std::lock_guard lock(mutex_);
  return mark_locked(record, Stamps::trusted);
}

Result<std::vector<MarkPtr>> Work::marks(const void* owner) {
  std::lock_guard lock(mutex_);
  drop_done_orphans();
  std::vector<MarkPtr> all;
  all.reserve(live_.size() + orphans_.size());
  for (StreamRecord* record : live_) {
    if (owner != nullptr && record->owner.load(std::memory_order_relaxed) != owner) continue;
    if (MarkPtr mark = METRALE_TRY(mark_locked(*record, Stamps::ignored))) all.push_back(std::move(mark));
  }
  for (const Orphan& orphan : orphans_) {
    if (owner == nullptr || orphan.owner == owner) all.push_back(orphan.mark);
  }
  return all;
}

void Work::add_mark(const void* owner, MarkPtr mark) {
  std::lock_guard lock(mutex_);
  drop_done_orphans();
  orphans_.push_back({owner, std::move(mark)});
}

void Work::drop_done_orphans() {
  std::erase_if(orphans_, [](const Orphan& orphan) { return orphan.mark->is_done(); });
}

std::string Work::kernels_in_flight() {
  std::lock_guard lock(mutex_);
  std::vector<const std::string*> names;
  for (const StreamRecord* record : live_) {
    const std::string* name = record->last_kernel.load(std::memory_order_acquire);
    if (name == nullptr || record->looks_idle()) continue;
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  std::string text;
  for (const std::string* name : names) text += (text.empty() ? "" : ", ") + *name;
  return text;
}

}  // namespace metrale::cuda
