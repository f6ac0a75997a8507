// SPDX-License-Identifier: Apache-2.0
//
// What is refused before a library or a device is asked: shapes, offsets, alignments and sizes.
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <string>

#include "bridges/flashinfer/tables.h"
#include "core/saturating.h"
#include "metrale/bridges/flashinfer.h"

namespace metrale::flashinfer {

using detail::Count;

namespace {

constexpr std::uint64_t kMostTokens = std::numeric_limits<std::int32_t>::max();
constexpr std::uint64_t kAlignment = 16;
constexpr std::uint64_t kElementsAligned = 8;
constexpr std::uint32_t kMostHeads = 1'024;
constexpr std::uint32_t kMostNormColumns = 49'152;
/// A block of FlashInfer's append has a thread for each 8 elements of a row.
constexpr std::uint64_t kMostAppendElements = 8 * 1'024;

Error refused(std::string text, std::source_location site) { return {Errc::invalid_argument, "flashinfer: " + text, site}; }

Result<> check_address(std::string_view what, DevicePtr ptr, std::uint64_t alignment, std::source_location site) {
  if (!ptr) return refused(fmt::format("{} is null", what), site);
  if (ptr.address % alignment != 0) {
    return refused(fmt::format("{} is at {:#x}; it has to be aligned to {} bytes", what, ptr.address, alignment), site);
  }
  return {};
}
Result<> check_optional(std::string_view what, DevicePtr ptr, std::uint64_t alignment, std::source_location site) {
  return ptr ? check_address(what, ptr, alignment, site) : Result<>();
}

/// `stride` in elements of rows of `row` elements; 0: packed.
Result<> check_stride(std::string_view what, std::uint64_t stride, std::uint64_t row, std::source_location site) {
  if (stride == 0) return {};
  if (stride < row) return refused(fmt::format("{} has rows of {} elements and a stride of {}", what, row, stride), site);
  if (stride % kElementsAligned != 0 || stride > kMostTokens) {
    return refused(fmt::format("{} has a stride of {} elements; multiples of {} up to {} are possible", what, stride,
                               kElementsAligned, kMostTokens),
                   site);
  }
  return {};
}

Result<> check_rows(std::string_view what, DevicePtr ptr, std::uint64_t rows, std::uint64_t stride, std::uint64_t element_bytes,
                    std::source_location site) {
  const Count bytes = Count(rows) * Count(stride) * element_bytes;
  if (bytes.saturated() || ptr.address + bytes.value() < ptr.address) {
    return refused(fmt::format("{} has {} rows of {} elements: no memory has them", what, rows, stride), site);
  }
  return {};
}

std::uint64_t or_packed(std::uint64_t stride, std::uint64_t row) noexcept { return stride == 0 ? row : stride; }

Result<> check_pages(const AttentionShape& shape, const PlanOptions& options, const Extent& extent, const KvPages& kv,
                     std::source_location site) {
  METRALE_TRY(check_address("k of the pages", kv.k, kAlignment, site));
  METRALE_TRY(check_address("v of the pages", kv.v, kAlignment, site));
  if (kv.num_heads != shape.num_kv_heads || kv.head_dim != shape.head_dim || kv.dtype != shape.dtype) {
    return refused(fmt::format("the pages have {} heads of {} in {}, the plan {} heads of {} in {}", kv.num_heads, kv.head_dim,
                               to_string(kv.dtype), shape.num_kv_heads, shape.head_dim, to_string(shape.dtype)),
                   site);
  }
  if (kv.page_size != options.page_size) {
    return refused(fmt::format("pages of {} tokens were given to a plan for pages of {}", kv.page_size, options.page_size), site);
  }
  const auto page_size = std::uint64_t{kv.page_size};
  for (const std::uint64_t stride : {kv.page_stride, kv.token_stride, kv.head_stride}) {
    if (stride == 0 || stride % kElementsAligned != 0 || stride > std::numeric_limits<std::uint32_t>::max()) {
      return refused(fmt::format("the pages have strides {}, {} and {}; each has to be a multiple of {} that fits 32 bits",
                                 kv.page_stride, kv.token_stride, kv.head_stride, kElementsAligned),
                     site);
    }
  }
  // Heads inside tokens, or tokens inside heads; pages outside both.
  const std::uint64_t last_head = (kv.num_heads - 1) * kv.head_stride + kv.head_dim;
  const std::uint64_t last_token = (page_size - 1) * kv.token_stride + kv.head_dim;
  const bool heads_inside = kv.head_stride >= kv.head_dim && kv.token_stride >= last_head;
  const bool tokens_inside = kv.token_stride >= kv.head_dim && kv.head_stride >= last_token;
  const bool pages_outside = kv.page_stride >= last_head + last_token - kv.head_dim;
  if (!pages_outside || !(heads_inside || tokens_inside)) {
    return refused(fmt::format("rows of {} elements overlap with strides of {} for pages, {} for tokens and {} for heads",
                               kv.head_dim, kv.page_stride, kv.token_stride, kv.head_stride),
                   site);
  }
  if (extent.num_pages > kv.num_pages) {
    return Error(Errc::out_of_range,
                 fmt::format("flashinfer: the plan names page {}, and there are {}", extent.num_pages - 1, kv.num_pages), site);
  }
  return check_rows("the pages", kv.k, kv.num_pages, kv.page_stride, 2, site);
}

Result<> check_planned(const Extent& extent, std::source_location site) {
  if (extent.rows == 0) return refused("nothing is planned: call plan first", site);
  return {};
}

Result<> check_queries(const AttentionShape& shape, const Extent& extent, DevicePtr q, std::uint64_t q_stride, DevicePtr out,
                       DevicePtr lse, std::source_location site) {
  METRALE_TRY(check_planned(extent, site));
  const std::uint64_t row = std::uint64_t{shape.num_q_heads} * shape.head_dim;
  METRALE_TRY(check_address("q", q, kAlignment, site));
  METRALE_TRY(check_address("out", out, kAlignment, site));
  METRALE_TRY(check_optional("lse", lse, 4, site));
  METRALE_TRY(check_stride("q", q_stride, row, site));
  METRALE_TRY(check_rows("q", q, extent.rows, or_packed(q_stride, row), 2, site));
  return check_rows("out", out, extent.rows, row, 2, site);
}

}  // namespace

std::string_view to_string(Kernel kernel) noexcept {
  switch (kernel) {
    case Kernel::automatic: return "automatic";
    case Kernel::cuda_cores: return "cuda_cores";
    case Kernel::tensor_cores: return "tensor_cores";
    case Kernel::hopper: return "hopper";
  }
  return "unknown";
}

Result<> check(const AttentionShape& shape, std::source_location site) {
  if (shape.num_q_heads == 0 || shape.num_kv_heads == 0 || shape.num_q_heads > kMostHeads ||
      shape.num_q_heads % shape.num_kv_heads != 0) {
    return refused(fmt::format("{} query heads and {} key heads; the first has to be a multiple of the second, up to {}",
                               shape.num_q_heads, shape.num_kv_heads, kMostHeads),
                   site);
  }
  if (shape.head_dim != 64 && shape.head_dim != 128 && shape.head_dim != 256) {
    return refused(fmt::format("heads of {} elements; 64, 128 and 256 are possible", shape.head_dim), site);
  }
  if (shape.dtype != DType::bf16) {
    return refused(fmt::format("queries, keys and values in {}; bf16 is possible", to_string(shape.dtype)), site);
  }
  if (!std::isfinite(shape.soft_cap) || shape.soft_cap < 0 || !std::isfinite(shape.scale) || shape.scale < 0) {
    return refused(fmt::format("a scale of {} and a cap of {}; both have to be finite, and 0 or more", shape.scale, shape.soft_cap),
                   site);
  }
  if (shape.window > kMostTokens) {
    return refused(fmt::format("a window of {} tokens; up to {} are possible", shape.window, kMostTokens), site);
  }
  if (shape.window > 0 && !shape.causal) return refused("a window needs a causal mask", site);
  return {};
}

Result<> check(const AttentionShape& shape, const PlanOptions& options, std::source_location site) {
  METRALE_TRY(check(shape, site));
  if (options.page_size > kMostTokens) return refused(fmt::format("pages of {} tokens", options.page_size), site);
  if (options.kernel == Kernel::cuda_cores && options.page_size == 0) {
    return refused("the kernel of one query for each sequence reads pages; take another for packed keys and values", site);
  }
  if (options.max_batch == 0) {
    if (options.max_rows == 0 && options.max_pages == 0) return {};
    return refused(fmt::format("max_rows {} and max_pages {} without max_batch", options.max_rows, options.max_pages), site);
  }
  const std::uint32_t rows = options.max_rows == 0 ? options.max_batch : options.max_rows;
  const std::uint32_t group = shape.num_q_heads / shape.num_kv_heads;
  if (rows < options.max_batch || std::uint64_t{rows} * group > kMostTokens) {
    return refused(fmt::format("max_batch {} and max_rows {}; each sequence has a query, and {} queries in all are possible",
                               options.max_batch, rows, kMostTokens / group),
                   site);
  }
  const std::uint64_t tokens = std::uint64_t{options.max_pages} * std::max(options.page_size, 1U);
  if (options.max_pages < options.max_batch || tokens > kMostTokens) {
    return refused(fmt::format("max_pages {} of {} tokens for {} sequences; each needs one, and {} tokens in all are possible",
                               options.max_pages, options.page_size, options.max_batch, kMostTokens),
                   site);
  }
  if (options.kernel == Kernel::cuda_cores && rows != options.max_batch) {
    return refused(fmt::format("{} queries for {} sequences; the kernel asked for has one for each", rows, options.max_batch),
                   site);
  }
  return {};
}

Result<> check(const AttentionShape& shape, const PlanOptions& options, std::span<const Sequence> sequences,
               std::source_location site) {
  METRALE_TRY(check(shape, options, site));
  if (sequences.empty()) return refused("a batch of no sequences", site);
  const bool packed = options.page_size == 0;
  const std::uint32_t page_size = std::max(options.page_size, 1U);
  std::uint64_t rows = 0;
  std::uint64_t pages = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& sequence = sequences[i];
    if (sequence.kv_tokens == 0 || sequence.kv_tokens > kMostTokens || sequence.q_tokens == 0 || sequence.q_tokens > kMostTokens) {
      return refused(
          fmt::format("sequence {} has {} queries and {} keys; leave empty ones out", i, sequence.q_tokens, sequence.kv_tokens),
          site);
    }
    if (shape.causal && sequence.q_tokens > sequence.kv_tokens) {
      return refused(fmt::format("sequence {} has {} queries and {} keys; under a causal mask each query has its key", i,
                                 sequence.q_tokens, sequence.kv_tokens),
                     site);
    }
    if (options.kernel == Kernel::cuda_cores && sequence.q_tokens != 1) {
      return refused(fmt::format("sequence {} has {} queries; the kernel asked for takes one", i, sequence.q_tokens), site);
    }
    const std::uint64_t needed = div_ceil(sequence.kv_tokens, page_size);
    if (packed && !sequence.pages.empty()) {
      return refused(fmt::format("sequence {} has pages, and the plan is for packed keys and values", i), site);
    }
    if (!packed && sequence.pages.size() < needed) {
      return refused(
          fmt::format("sequence {} has {} tokens and {} pages of {}", i, sequence.kv_tokens, sequence.pages.size(), page_size),
          site);
    }
    // Those before the window are not read, and may be anything.
    const std::uint64_t skipped = packed ? 0 : pages_before_window(shape, sequence, page_size);
    for (std::uint64_t j = packed ? needed : skipped; j < needed; ++j) {
      if (sequence.pages[j] < 0) return refused(fmt::format("page {} of sequence {} is {}", j, i, sequence.pages[j]), site);
    }
    rows += sequence.q_tokens;
    pages += needed - skipped;
  }
  const std::uint32_t group = shape.num_q_heads / shape.num_kv_heads;
  if (rows * group > kMostTokens || pages * page_size > kMostTokens || sequences.size() > kMostTokens) {
    return refused(fmt::format("{} queries of {} heads to a key head, and {} pages of {} tokens; {} of each are possible", rows,
                               group, pages, page_size, kMostTokens),
                   site);
  }
  if (options.max_batch == 0) return {};
  const std::uint32_t most_rows = options.max_rows == 0 ? options.max_batch : options.max_rows;
  // Where each sequence has one query, an absent one is planned as one query of one page.
  const bool one_each = most_rows == options.max_batch;
  const std::uint64_t absent = one_each ? options.max_batch - std::min<std::uint64_t>(options.max_batch, sequences.size()) : 0;
  if (!packed && rows < most_rows && options.spare_page < 0) {
    return refused(fmt::format("{} queries for a plan of {}: give all, or a spare_page for the others", rows, most_rows), site);
  }
  if (sequences.size() > options.max_batch || rows + absent > most_rows || pages + absent > options.max_pages) {
    return refused(fmt::format("{} sequences, {} queries and {} pages for a plan of {}, {} and {}", sequences.size(), rows, pages,
                               options.max_batch, most_rows, options.max_pages),
                   site);
  }
  return {};
}

Result<> check(const AttentionShape& shape, const PlanOptions& options, const Extent& extent, const PagedCall& call,
               std::source_location site) {
  if (options.page_size == 0) return refused("pages were given to a plan for packed keys and values", site);
  METRALE_TRY(check_queries(shape, extent, call.q, call.q_stride, call.out, call.lse, site));
  return check_pages(shape, options, extent, call.kv, site);
}

Result<> check(const AttentionShape& shape, const PlanOptions& options, const Extent& extent, const PackedCall& call,
               std::source_location site) {
  if (options.page_size != 0) {
    return refused(fmt::format("packed keys and values were given to a plan for pages of {}", options.page_size), site);
  }
  METRALE_TRY(check_queries(shape, extent, call.q, call.q_stride, call.out, call.lse, site));
  const std::uint64_t row = std::uint64_t{shape.num_kv_heads} * shape.head_dim;
  METRALE_TRY(check_address("k", call.k, kAlignment, site));
  METRALE_TRY(check_address("v", call.v, kAlignment, site));
  METRALE_TRY(check_stride("k and v", call.kv_stride, row, site));
  return check_rows("k", call.k, extent.kv_rows, or_packed(call.kv_stride, row), 2, site);
}

Result<> check(const AttentionShape& shape, const PlanOptions& options, const Extent& extent, const AppendCall& call,
               std::source_location site) {
  if (options.page_size == 0) return refused("there are no pages to append to in a plan for packed keys and values", site);
  METRALE_TRY(check_planned(extent, site));
  const std::uint64_t row = std::uint64_t{shape.num_kv_heads} * shape.head_dim;
  if (row > kMostAppendElements) {
    return refused(fmt::format("appending rows of {} elements; {} are possible", row, kMostAppendElements), site);
  }
  METRALE_TRY(check_address("k", call.k, kAlignment, site));
  METRALE_TRY(check_address("v", call.v, kAlignment, site));
  METRALE_TRY(check_stride("k and v", call.row_stride, row, site));
  METRALE_TRY(check_rows("k", call.k, extent.rows, or_packed(call.row_stride, row), 2, site));
  return check_pages(shape, options, extent, call.kv, site);
}

Result<> check(const AddNormCall& call, std::source_location site) {
  if (call.rows == 0 || call.rows > kMostTokens || call.columns == 0 || call.columns % kElementsAligned != 0 ||
      call.columns > kMostNormColumns) {
    return refused(fmt::format("norm of {} rows of {}; a multiple of {} up to {} is possible", call.rows, call.columns,
                               kElementsAligned, kMostNormColumns),
                   site);
  }
  if (!std::isfinite(call.eps) || call.eps < 0) return refused(fmt::format("an eps of {}", call.eps), site);
  METRALE_TRY(check_address("x", call.x, kAlignment, site));
  METRALE_TRY(check_address("residual", call.residual, kAlignment, site));
  METRALE_TRY(check_address("weight", call.weight, kAlignment, site));
  METRALE_TRY(check_stride("x", call.x_stride, call.columns, site));
  METRALE_TRY(check_stride("residual", call.residual_stride, call.columns, site));
  // FlashInfer counts elements in 32 bits.
  const std::uint64_t widest = std::max(or_packed(call.x_stride, call.columns), or_packed(call.residual_stride, call.columns));
  if (call.rows * widest > std::numeric_limits<std::uint32_t>::max()) {
    return refused(fmt::format("norm of {} rows with a stride of {}; {} elements in all are possible", call.rows, widest,
                               std::numeric_limits<std::uint32_t>::max()),
                   site);
  }
  return {};
}

Result<> check(const SampleCall& call, std::source_location site) {
  const std::uint64_t elements = std::uint64_t{call.rows} * call.vocabulary;
  // FlashInfer counts elements in 32 bits.
  if (elements == 0 || elements > std::numeric_limits<std::uint32_t>::max() || call.vocabulary > kMostTokens) {
    return refused(fmt::format("sampling from {} rows of {} logits; {} in all are possible", call.rows, call.vocabulary,
                               std::numeric_limits<std::uint32_t>::max()),
                   site);
  }
  METRALE_TRY(check_address("logits", call.logits, kAlignment, site));
  METRALE_TRY(check_address("tokens", call.tokens, 4, site));
  METRALE_TRY(check_optional("temperatures", call.temperatures, 4, site));
  METRALE_TRY(check_optional("top_ks", call.top_ks, 4, site));
  METRALE_TRY(check_optional("top_ps", call.top_ps, 4, site));
  METRALE_TRY(check_optional("seed_device", call.seed_device, 8, site));
  METRALE_TRY(check_optional("offset_device", call.offset_device, 8, site));
  if (!call.temperatures && !(std::isfinite(call.temperature) && call.temperature > 0)) {
    return refused(fmt::format("a temperature of {}; it has to be above 0: take the largest logit for 0", call.temperature), site);
  }
  if (!call.top_ks && call.top_k < 0) return refused(fmt::format("a top_k of {}", call.top_k), site);
  if (!call.top_ps && !(call.top_p > 0 && call.top_p <= 1)) return refused(fmt::format("a top_p of {}", call.top_p), site);
  return {};
}

Result<KvPages> kv_pages(const PagedKvCache& cache, std::uint32_t layer, std::source_location site) {
  if (layer >= cache.num_layers() || !cache.k_pool(layer)) {
    return Error(Errc::out_of_range,
                 cache.num_blocks() == 0 ? std::string("flashinfer: the kv cache was released")
                                         : fmt::format("flashinfer: layer {} of a kv cache of {}", layer, cache.num_layers()),
                 site);
  }
  const KvLayer& side = cache.layout().layers[layer];
  if (!(side.k == side.v) || side.k.dtype != DType::bf16) {
    return Error(
        Errc::unsupported,
        fmt::format("flashinfer: layer {} has keys of {} heads of {} in {} and values of {} heads of {} in {}; both have to be "
                    "alike, in bf16",
                    layer, side.k.num_heads, side.k.head_dim, to_string(side.k.dtype), side.v.num_heads, side.v.head_dim,
                    to_string(side.v.dtype)),
        site);
  }
  const std::uint64_t row = std::uint64_t{side.k.num_heads} * side.k.head_dim;
  return KvPages{.k = cache.k_pool(layer),
                 .v = cache.v_pool(layer),
                 .num_pages = cache.num_blocks(),
                 .page_size = cache.block_size(),
                 .num_heads = side.k.num_heads,
                 .head_dim = side.k.head_dim,
                 .dtype = side.k.dtype,
                 .page_stride = cache.block_size() * row,
                 .token_stride = row,
                 .head_stride = side.k.head_dim};
}

}  // namespace metrale::flashinfer
