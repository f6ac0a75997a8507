// SPDX-License-Identifier: Apache-2.0
#include "bridges/flashinfer/tables.h"

#include <algorithm>

namespace metrale::flashinfer {

void fill(const AttentionShape& shape, const PlanOptions& options, std::span<const Sequence> sequences, Tables& tables,
          Extent& extent) {
  const bool packed = options.page_size == 0;
  const std::uint32_t page_size = std::max(options.page_size, 1U);
  const bool one_each = options.max_rows == options.max_batch;
  tables.clear();
  extent = {};
  std::int32_t last_page = -1;
  const auto add = [&](std::span<const std::int32_t> pages, std::uint32_t kv_tokens, std::uint32_t q_tokens) {
    const auto sequence = static_cast<std::int32_t>(tables.batch());
    for (std::uint32_t i = 0; i < q_tokens; ++i) {
      tables.batch_indices.push_back(sequence);
      tables.positions.push_back(static_cast<std::int32_t>(kv_tokens - q_tokens + i));
    }
    tables.indices.insert(tables.indices.end(), pages.begin(), pages.end());
    tables.q_indptr.push_back(tables.q_indptr.back() + static_cast<std::int32_t>(q_tokens));
    tables.page_indptr.push_back(static_cast<std::int32_t>(tables.indices.size()));
    tables.kv_len.push_back(static_cast<std::int32_t>(kv_tokens));
    tables.last_page_len.push_back(kv_tokens == 0 ? 0 : static_cast<std::int32_t>((kv_tokens - 1) % page_size + 1));
    for (const std::int32_t page : pages) last_page = std::max(last_page, page);
  };
  std::vector<std::int32_t> rows_as_pages;
  for (const Sequence& sequence : sequences) {
    if (packed) {
      rows_as_pages.resize(sequence.kv_tokens);
      for (std::uint32_t i = 0; i < sequence.kv_tokens; ++i) {
        rows_as_pages[i] = tables.page_indptr.back() + static_cast<std::int32_t>(i);
      }
      add(rows_as_pages, sequence.kv_tokens, sequence.q_tokens);
      continue;
    }
    const std::uint64_t skipped = pages_before_window(shape, sequence, page_size);
    const std::uint64_t used = div_ceil(sequence.kv_tokens, page_size) - skipped;
    add(sequence.pages.subspan(skipped, used), static_cast<std::uint32_t>(sequence.kv_tokens - skipped * page_size),
        sequence.q_tokens);
  }
  if (options.max_batch > 0) {
    const std::int32_t spare = packed ? 0 : options.spare_page;
    while (tables.batch() < options.max_batch) {
      if (one_each) {
        add({&spare, 1}, 1, 1);
      } else {
        add({}, 0, 0);
      }
    }
    // What is not planned is appended behind the last table, where the spare page stands.
    tables.batch_indices.resize(options.max_rows, static_cast<std::int32_t>(tables.batch()));
    tables.positions.resize(options.max_rows, 0);
    extent.rows = options.max_rows;
    extent.kv_rows = packed ? options.max_pages : 0;
    if (!packed && spare >= 0) {
      tables.indices.push_back(spare);
      last_page = std::max(last_page, spare);
    }
  } else {
    extent.rows = static_cast<std::uint32_t>(tables.q_indptr.back());
    extent.kv_rows = packed ? static_cast<std::uint64_t>(tables.page_indptr.back()) : 0;
  }
  extent.num_pages = packed ? 0 : static_cast<std::uint32_t>(last_page + 1);
}

Capacity capacity_for(const AttentionShape& shape, const PlanOptions& options, const Tables& tables, const Extent& extent,
                      Kernel kernel, std::uint32_t num_sms) noexcept {
  const std::uint64_t sms = num_sms;
  const std::uint64_t group = shape.num_q_heads / shape.num_kv_heads;
  Capacity need;
  need.batch = tables.batch();
  need.rows = extent.rows;
  need.pages = options.max_batch > 0 ? std::uint64_t{options.max_pages} + 1 : tables.indices.size();
  constexpr std::uint64_t kBlocksOnSm = 32;
  constexpr std::uint64_t kSmallestTile = 16;
  constexpr std::uint64_t kAlignments = 16 * 16;  // of FlashInfer's arrays
  switch (kernel) {
    case Kernel::hopper: {
      const std::uint64_t tiles = (div_ceil(need.rows, 128) + need.batch) * shape.num_q_heads;
      need.schedule_bytes = 4 * (7 * tiles + sms + 1) + kAlignments;
      break;
    }
    case Kernel::cuda_cores: {
      const std::uint64_t blocks = std::max<std::uint64_t>(need.batch, kBlocksOnSm * sms / shape.num_kv_heads);
      need.schedule_bytes = 13 * (blocks + 2) + kAlignments;
      break;
    }
    case Kernel::automatic:
    case Kernel::tensor_cores: {
      const std::uint64_t tiles = div_ceil(std::uint64_t{need.rows} * group, kSmallestTile) + need.batch;
      const std::uint64_t blocks = std::max<std::uint64_t>(tiles, 2 * sms / shape.num_kv_heads);
      need.schedule_bytes = 13 * (blocks + 1) + 4 * (need.batch + std::uint64_t{need.rows} + 4) + kAlignments;
      break;
    }
  }
  return need;
}

}  // namespace metrale::flashinfer
