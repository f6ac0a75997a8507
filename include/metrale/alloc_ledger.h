// SPDX-License-Identifier: Apache-2.0
//
// The ledger of live memory: every block a backend handed out, with its size, kind, generation and the line that asked. It answers
// "which block is this address in" for copies and fault reports, sums what is live, and prints who holds it. It owns no memory.
// Any thread; blocks of different 64 KiB pages do not contend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/types.h"

namespace metrale {

enum class MemoryKind : std::uint8_t {
  device,         ///< alloc
  managed,        ///< alloc_managed
  pooled,         ///< alloc_async
  arena,          ///< alloc_arena; outside live_bytes
  pinned,         ///< alloc_host_pinned, or the device alias of it
  registered,     ///< register_host, or the device alias of it
  adopted,        ///< adopt; never freed by us
  module_symbol,  ///< a kernel module's global; never freed by us
};
std::string_view to_string(MemoryKind kind) noexcept;
/// Whether blocks of this kind count in `live_bytes`.
constexpr bool counts_as_live(MemoryKind kind) noexcept { return kind <= MemoryKind::pooled; }
/// The bit of a kind in a set of kinds, which is the sum of its bits.
constexpr std::uint32_t kind_bit(MemoryKind kind) noexcept { return 1u << static_cast<unsigned>(kind); }
/// The set of all kinds.
inline constexpr std::uint32_t kAllKinds = 2 * kind_bit(MemoryKind::module_symbol) - 1;

/// One live block.
struct Allocation {
  DevicePtr base;
  std::uint64_t bytes = 0;
  MemoryKind kind = MemoryKind::device;
  std::uint32_t graph_refs = 0;  ///< Live graphs that name it.
  std::uint64_t generation = 0;  ///< Never used twice, ascending on each thread: tells a block from a later one there.
  std::source_location site{};
  std::string_view owner{};  ///< Label of the OwnerScope it was allocated under; empty for none.
};

/// The live memory of one call site, for reports.
struct SiteUse {
  std::source_location site;
  std::uint64_t count = 0;
  std::uint64_t bytes = 0;
};

/// A backend has one for device addresses and one for pinned host addresses.
class AllocLedger {
 public:
  AllocLedger();
  ~AllocLedger();
  AllocLedger(const AllocLedger&) = delete;
  AllocLedger& operator=(const AllocLedger&) = delete;

  /// Enters a block and returns its generation. `bytes` > 0; the block overlaps no other.
  std::uint64_t add(DevicePtr base, std::uint64_t bytes, MemoryKind kind, std::source_location site);

  enum class Take : std::uint8_t { taken, not_a_base, wrong_kind, named_by_graph };
  struct TakeResult {
    Take status;
    Allocation block;  ///< The block at `base`; empty when not_a_base.
  };
  /// What becomes of a block that a graph names.
  enum class Named : std::uint8_t { stays, goes };
  /// Removes the block that starts at `base` if its kind is in `kinds`, and, unless `named` says it goes, no graph names it.
  TakeResult take(DevicePtr base, std::uint32_t kinds, Named named = Named::stays);

  enum class Range : std::uint8_t { inside, unknown, leaves };
  /// Whether [ptr, ptr + bytes) lies in one live block: `unknown` when `ptr` is in none, `leaves` when the end is outside.
  Range check(DevicePtr ptr, std::uint64_t bytes) const;
  /// The block that contains `ptr`, interior addresses included.
  std::optional<Allocation> find(DevicePtr ptr) const;
  /// The live block whose extent is nearest to `ptr`; nullopt when there is none.
  std::optional<Allocation> nearest(DevicePtr ptr) const;

  /// Counts one more graph that names the block containing `ptr`; returns that block, or nullopt.
  std::optional<Allocation> add_graph_ref(DevicePtr ptr);
  /// Undoes `add_graph_ref`; ignored when the block has gone.
  void drop_graph_ref(DevicePtr base, std::uint64_t generation);

  /// Bytes and number of the blocks whose kind counts as live.
  std::uint64_t live_bytes() const;
  std::uint64_t live_alloc_count() const;
  /// Highest live_bytes so far: exact while one thread allocates, within 1 MiB of it otherwise.
  std::uint64_t peak_bytes() const;
  /// Every block, lowest address first.
  std::vector<Allocation> snapshot() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The live memory of one owner, for reports.
struct OwnerUse {
  std::string_view owner;
  std::uint64_t count = 0;
  std::uint64_t bytes = 0;
};
/// Sums by owner, largest first; blocks of no owner under the empty label.
std::vector<OwnerUse> uses_by_owner(const std::vector<Allocation>& blocks);

/// Sums by call site, largest first.
std::vector<SiteUse> uses_by_site(const std::vector<Allocation>& blocks);

/// The text of `alloc_report`: totals; up to `top_n` sites of at least `min_mb` MiB, largest first, with count and MiB; one line
/// for the rest; roll-ups by file and by owner; arenas and pinned memory under headings of their own.
std::string format_alloc_report(const std::vector<Allocation>& blocks, std::size_t top_n, std::uint64_t min_mb);

/// Bytes lost to packing small blocks into 2 MiB chunks:
/// distinct chunks touched by blocks under 2 MiB, times 2 MiB, less their bytes.
/// Source: how the CUDA driver places small allocations.
std::uint64_t chunk_slack_bytes(const std::vector<Allocation>& blocks);

}  // namespace metrale
