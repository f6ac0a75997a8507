// SPDX-License-Identifier: Apache-2.0
//
// Where the tables of a plan lie in its memory, and what goes into them. Values; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "metrale/bridges/flashinfer.h"

namespace metrale::flashinfer {

/// Pages of a sequence that no query sees, counted from its first. Masks count from the last key, so tables may begin after them.
inline std::uint64_t pages_before_window(const AttentionShape& shape, const Sequence& sequence, std::uint32_t page_size) noexcept {
  const std::uint64_t seen = std::uint64_t{sequence.q_tokens} + shape.window - 1;
  return shape.window == 0 || sequence.kv_tokens <= seen ? 0 : (sequence.kv_tokens - seen) / page_size;
}

/// The batch as kernels read it.
struct Tables {
  std::vector<std::int32_t> q_indptr;
  std::vector<std::int32_t> page_indptr;
  std::vector<std::int32_t> last_page_len;
  std::vector<std::int32_t> kv_len;
  std::vector<std::int32_t> indices;  // and the spare page
  std::vector<std::int32_t> batch_indices;
  std::vector<std::int32_t> positions;
  friend bool operator==(const Tables&, const Tables&) = default;

  std::uint32_t batch() const noexcept { return static_cast<std::uint32_t>(last_page_len.size()); }
  void clear() noexcept {
    q_indptr.assign(1, 0);
    page_indptr.assign(1, 0);
    for (auto* table : {&last_page_len, &kv_len, &indices, &batch_indices, &positions}) table->clear();
  }
};

/// Reads `sequences`, which are checked, with what fills up a plan for graphs.
void fill(const AttentionShape& shape, const PlanOptions& options, std::span<const Sequence> sequences, Tables& tables,
          Extent& extent);

/// What a plan has room for.
struct Capacity {
  std::uint32_t batch = 0;
  std::uint32_t rows = 0;
  std::uint64_t pages = 0;
  std::uint64_t schedule_bytes = 0;
  bool holds(const Capacity& other) const noexcept {
    return batch >= other.batch && rows >= other.rows && pages >= other.pages && schedule_bytes >= other.schedule_bytes;
  }
};

/// Room for these tables and what FlashInfer puts beside them, at most, on a device of `num_sms`.
Capacity capacity_for(const AttentionShape& shape, const PlanOptions& options, const Tables& tables, const Extent& extent,
                      Kernel kernel, std::uint32_t num_sms) noexcept;

/// Offsets in bytes of the tables, the same on host and device: [q_indptr | page_indptr | last_page_len | batch_indices | positions
/// | page indices | schedule], of i32 but for the last, which is FlashInfer's.
struct Layout {
  std::uint64_t q_indptr = 0;
  std::uint64_t page_indptr = 0;
  std::uint64_t last_page_len = 0;
  std::uint64_t batch_indices = 0;
  std::uint64_t positions = 0;
  std::uint64_t indices = 0;
  std::uint64_t schedule = 0;
  std::uint64_t bytes = 0;

  explicit Layout(const Capacity& capacity = {}) noexcept {
    const auto place = [this](std::uint64_t size) {
      const std::uint64_t at = bytes;
      bytes += round_up(size, kDeviceAlignment);
      return at;
    };
    q_indptr = place(4 * (std::uint64_t{capacity.batch} + 1));
    page_indptr = place(4 * (std::uint64_t{capacity.batch} + 1));
    last_page_len = place(4 * std::uint64_t{capacity.batch});
    batch_indices = place(4 * std::uint64_t{capacity.rows});
    positions = place(4 * std::uint64_t{capacity.rows});
    indices = place(4 * capacity.pages);
    schedule = place(capacity.schedule_bytes);
  }
};

}  // namespace metrale::flashinfer
