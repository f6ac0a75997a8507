// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "metrale/arena.h"
#include "metrale/owner_scope.h"

namespace metrale {

Result<std::unique_ptr<BufferArena>> BufferArena::create(GpuBackend& backend, const ArenaSizes& sizes, std::source_location site) {
  std::unique_ptr<BufferArena> arena(new BufferArena(backend));
  const OwnerScope owner(arena->label());
  for (std::size_t i = 0; i < kNumArenaBuffers; ++i) {
    const auto id = static_cast<ArenaBuffer>(i);
    if (sizes[id] == 0) continue;
    Result<DeviceBuffer> buffer = DeviceBuffer::create(backend, sizes[id], site);
    if (!buffer) {
      return std::move(buffer).error().with_note(
          fmt::format("for arena buffer {} of {} bytes, {} in all", to_string(id), sizes[id], sizes.total_bytes()));
    }
    arena->buffers_[i] = std::move(*buffer);
  }
  if (const DevicePtr unit = (*arena)[ArenaBuffer::norm_unit_w]) {
    METRALE_TRY(backend.memset(unit, 0, arena->size_bytes(ArenaBuffer::norm_unit_w), site));
  }
  return arena;
}

BufferArena::~BufferArena() = default;

std::uint64_t BufferArena::total_bytes() const noexcept {
  std::uint64_t sum = 0;
  for (const DeviceBuffer& buffer : buffers_) sum += buffer.size_bytes();
  return sum;
}

std::string BufferArena::report() const {
  std::vector<ArenaBuffer> held;
  for (std::size_t i = 0; i < kNumArenaBuffers; ++i) {
    if (buffers_[i]) held.push_back(static_cast<ArenaBuffer>(i));
  }
  std::sort(held.begin(), held.end(),
            [&](ArenaBuffer a, ArenaBuffer b) { return std::pair(size_bytes(b), a) < std::pair(size_bytes(a), b); });
  std::string text;
  for (const ArenaBuffer id : held) text += fmt::format("{:>14}  {}\n", size_bytes(id), to_string(id));
  return text + fmt::format("{:>14}  total, {} buffers\n", total_bytes(), held.size());
}

Result<> BufferArena::release(GpuBackend& backend) {
  if (&backend != backend_) {
    return Error(Errc::invalid_argument, "release of the buffer arena on another backend than the one it was made on");
  }
  Result<> first;
  for (std::size_t i = 0; i < kNumArenaBuffers; ++i) {
    Result<> result = buffers_[i].release();
    if (!result && first) {
      first = std::move(result).error().with_note(fmt::format("for arena buffer {}", to_string(static_cast<ArenaBuffer>(i))));
    }
  }
  return first;
}

}  // namespace metrale
