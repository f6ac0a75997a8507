// SPDX-License-Identifier: Apache-2.0
#include "metrale/observer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

namespace metrale {

static_assert(std::is_trivially_copyable_v<OpRecord>, "the flight recorder copies records as words");

std::string OpRecord::to_string() const {
  std::string text = fmt::format("{:>14} ns  {}", time_ns, metrale::to_string(op));
  if (stream) text += fmt::format(" stream {:#x}", stream.value);
  if (kernel) {
    text += fmt::format(" kernel {:#x} grid {}x{}x{} block {}x{}x{} shared {} args {}", kernel.value, grid.x, grid.y, grid.z,
                        block.x, block.y, block.z, shared_bytes, num_args);
  }
  if (dst != 0) text += fmt::format(" dst {:#x}", dst);
  if (src != 0) text += fmt::format(" src {:#x}", src);
  if (bytes != 0) text += fmt::format(" bytes {}", bytes);
  if (outcome != 0) text += fmt::format(" -> {}", metrale::to_string(static_cast<Errc>(outcome)));
  text += fmt::format(" ({}:{})", site.file_name(), site.line());
  return text;
}

void Observer::on_launch_args(const OpRecord&, std::span<const KernelArg>) noexcept {}

std::size_t FlightRecorder::num_words(const OpRecord& record) noexcept {
  constexpr std::size_t kCommon = offsetof(OpRecord, kernel) / sizeof(std::uint64_t);
  constexpr std::size_t kGeometry = offsetof(OpRecord, args) / sizeof(std::uint64_t);
  static_assert(sizeof(OpRecord) == kWords * sizeof(std::uint64_t), "whole words only");
  static_assert(kCommon < 64 / sizeof(std::uint64_t), "one line of the cache, with the sequence");
  const bool has_kernel = record.op == Op::launch || record.op == Op::launch_raw || record.op == Op::kernel;
  return has_kernel ? kGeometry + std::min<std::size_t>(record.num_args, kRecordedArgs) : kCommon;
}

// A slot's sequence is 2i + 1 while record i is claimed and written, and 2i + 2 once it is whole. The words are stored with release
// and read with acquire: a reader that met one word of a later record therefore also sees that record's odd sequence, and drops
// what it read.
void FlightRecorder::fill(std::uint64_t place, const OpRecord& record) noexcept {
  Slot& slot = slots_[place % kCapacity];
  if (slot.sequence.load(std::memory_order_relaxed) != 2 * place + 1) return;
  const char* from = reinterpret_cast<const char*>(&record);
  const std::size_t count = num_words(record);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, from + i * sizeof(word), sizeof(word));
    slot.words[i].store(word, std::memory_order_release);
  }
  slot.sequence.store(2 * place + 2, std::memory_order_release);
}

std::vector<OpRecord> FlightRecorder::snapshot() const {
  const std::uint64_t end = next_.load(std::memory_order_relaxed);
  const std::uint64_t begin = end > kCapacity ? end - kCapacity : 0;
  std::vector<OpRecord> records;
  records.reserve(end - begin);
  for (std::uint64_t index = begin; index < end; ++index) {
    const Slot& slot = slots_[index % kCapacity];
    if (slot.sequence.load(std::memory_order_acquire) != 2 * index + 2) continue;
    std::array<std::uint64_t, kWords> words;
    for (std::size_t i = 0; i < kWords; ++i) words[i] = slot.words[i].load(std::memory_order_acquire);
    if (slot.sequence.load(std::memory_order_relaxed) != 2 * index + 2) continue;
    OpRecord record;
    std::memcpy(static_cast<void*>(&record), words.data(), sizeof(record));
    // What lies behind is an earlier record's.
    std::fill(words.begin() + static_cast<std::ptrdiff_t>(num_words(record)), words.end(), 0);
    std::memcpy(static_cast<void*>(&record), words.data(), sizeof(record));
    records.push_back(record);
  }
  return records;
}

std::string FlightRecorder::to_string() const {
  std::string text;
  for (const OpRecord& record : snapshot()) text += record.to_string() + '\n';
  return text;
}

}  // namespace metrale
