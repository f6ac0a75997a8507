// SPDX-License-Identifier: Apache-2.0
#include "metrale/span_timer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "core/face_state.h"
#include "metrale/backend.h"

namespace metrale {
namespace {

// A slot goes round: vacant, begun by one thread, open, ended by one thread, measured, and vacant again once harvested.
enum class SlotState : std::uint8_t { vacant, claimed, open, measured };

struct Slot {
  std::atomic<SlotState> state{SlotState::vacant};
  EventHandle start;
  EventHandle end;
  // Written while claimed, read while open or measured.
  std::string_view name;
  StreamHandle stream;
  std::uint64_t index = 0;
};

struct AtomicCounts {
  std::atomic<std::uint64_t> begun{0};
  std::atomic<std::uint64_t> dropped{0};
  std::atomic<std::uint64_t> skipped{0};
  std::atomic<std::uint64_t> failed{0};
  std::atomic<std::uint64_t> harvested{0};
};

void count(std::atomic<std::uint64_t>& n) noexcept { n.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

struct SpanTimer::Ring {
  std::array<Slot, kCapacity> slots;
  std::atomic<std::uint64_t> next{0};
  AtomicCounts counts;
  std::mutex harvest;
};

SpanTimer::SpanTimer(GpuBackend& backend) noexcept : backend_(backend) {}

SpanTimer::~SpanTimer() { delete ring_.load(std::memory_order_acquire); }

Result<> SpanTimer::arm(std::source_location site) {
  return detail::FaceState::caught("arm the span timer", site, [&] { return make_ring(site); });
}

Result<> SpanTimer::make_ring(std::source_location site) {
  if (ring_.load(std::memory_order_acquire) == nullptr) {
    const Capabilities& capabilities = backend_.capabilities();
    if (!capabilities.has(Capability::timed_events)) {
      return Error(Errc::unsupported,
                   fmt::format("timing spans on backend {}: no timed events: {}", backend_.name(),
                               capabilities.why_not(Capability::timed_events)),
                   site);
    }
    auto ring = std::make_unique<Ring>();
    for (Slot& slot : ring->slots) {
      for (EventHandle* event : {&slot.start, &slot.end}) {
        Result<EventHandle> made = backend_.create_timed_event(site);
        if (!made) {
          for (const Slot& earlier : ring->slots) {
            (void)backend_.destroy_event(earlier.start);
            (void)backend_.destroy_event(earlier.end);
          }
          return std::move(made).error().with_note("while making the events of the timing ring");
        }
        *event = *made;
      }
    }
    ring_.store(ring.release(), std::memory_order_release);
  }
  armed_.store(true, std::memory_order_relaxed);
  return {};
}

SpanTimer::Token SpanTimer::begin_armed(std::string_view name, StreamHandle stream) noexcept {
  Ring* const ring = ring_.load(std::memory_order_acquire);
  if (ring == nullptr) return {};
  if (backend_.stream_is_capturing(stream)) {
    count(ring->counts.skipped);
    return {};
  }
  const std::uint64_t index = ring->next.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = ring->slots[index % kCapacity];
  SlotState expected = SlotState::vacant;
  if (!slot.state.compare_exchange_strong(expected, SlotState::claimed, std::memory_order_acquire, std::memory_order_relaxed)) {
    count(ring->counts.dropped);
    return {};
  }
  if (!backend_.record_event(slot.start, stream)) {
    count(ring->counts.failed);
    slot.state.store(SlotState::vacant, std::memory_order_release);
    return {};
  }
  slot.name = name;
  slot.stream = stream;
  slot.index = index;
  count(ring->counts.begun);
  slot.state.store(SlotState::open, std::memory_order_release);
  return {index + 1};
}

void SpanTimer::end_armed(Token token) noexcept {
  Ring* const ring = ring_.load(std::memory_order_acquire);
  if (ring == nullptr) return;
  Slot& slot = ring->slots[(token.value - 1) % kCapacity];
  SlotState expected = SlotState::open;
  if (!slot.state.compare_exchange_strong(expected, SlotState::claimed, std::memory_order_acquire, std::memory_order_relaxed))
    return;
  SlotState next = SlotState::vacant;
  if (slot.index != token.value - 1) {
    next = SlotState::open;  // an old token, ended twice: the slot is another span's by now
  } else if (backend_.stream_is_capturing(slot.stream)) {
    count(ring->counts.skipped);
  } else if (!backend_.record_event(slot.end, slot.stream)) {
    count(ring->counts.failed);
  } else {
    next = SlotState::measured;
  }
  slot.state.store(next, std::memory_order_release);
}

std::vector<SpanTimer::Span> SpanTimer::harvest() {
  std::vector<Span> spans;
  Ring* const ring = ring_.load(std::memory_order_acquire);
  if (ring == nullptr) return spans;
  const std::unique_lock lock(ring->harvest, std::try_to_lock);
  if (!lock) return spans;
  for (Slot& slot : ring->slots) {
    if (slot.state.load(std::memory_order_acquire) != SlotState::measured) continue;
    const Result<bool> done = backend_.event_query(slot.end);
    if (done && !*done) continue;
    const Result<std::int64_t> elapsed = done ? backend_.event_elapsed_ns(slot.start, slot.end) : Result<std::int64_t>(-1);
    if (elapsed && *elapsed >= 0) {
      spans.push_back({slot.name, slot.stream, slot.index, *elapsed});
      count(ring->counts.harvested);
    } else {
      count(ring->counts.failed);
    }
    slot.state.store(SlotState::vacant, std::memory_order_release);
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.index < b.index; });
  return spans;
}

SpanTimer::Counts SpanTimer::counts() const noexcept {
  const Ring* const ring = ring_.load(std::memory_order_acquire);
  if (ring == nullptr) return {};
  const AtomicCounts& c = ring->counts;
  const auto read = [](const std::atomic<std::uint64_t>& n) { return n.load(std::memory_order_relaxed); };
  return {.num_begun = read(c.begun),
          .num_dropped = read(c.dropped),
          .num_skipped = read(c.skipped),
          .num_failed = read(c.failed),
          .num_harvested = read(c.harvested)};
}

Result<> SpanTimer::release() {
  disarm();
  const std::unique_ptr<Ring> ring(ring_.exchange(nullptr, std::memory_order_acq_rel));
  Result<> first;
  if (ring == nullptr) return first;
  for (const Slot& slot : ring->slots) {
    for (const EventHandle event : {slot.start, slot.end}) {
      Result<> destroyed = backend_.destroy_event(event);
      if (!destroyed && first) first = std::move(destroyed);
    }
  }
  return first;
}

}  // namespace metrale
