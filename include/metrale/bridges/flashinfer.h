// SPDX-License-Identifier: Apache-2.0
//
// FlashInfer: attention over paged and packed keys and values, appending to pages, sampling, and addition with RMS norm. A `Bridge`
// belongs to one backend, which outlives it; an `AttentionPlan` to one bridge. Attention is planned once for a batch and then run
// for each layer: `plan` reads the sequences on the host and puts tables and schedule into device memory, `run` enqueues kernels
// and nothing else. Tensors are row-major bf16 unless said, aligned to 16 bytes, with row strides that are multiples of 8 elements.
// A bridge may be used from any thread; a plan from one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <source_location>
#include <span>
#include <string>

#include "metrale/backend.h"
#include "metrale/bridges/bridge_status.h"
#include "metrale/dtype.h"
#include "metrale/kv_cache.h"
#include "metrale/model_resource.h"
#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale::flashinfer {

/// What this build has of FlashInfer. A device may still lack code: `Bridge::create` says so.
BridgeStatus status();

// ---- attention ----

/// softmax(scale · q·kᵀ, capped and masked) · v, with `num_q_heads / num_kv_heads` query heads to each head of keys and values.
struct AttentionShape {
  std::uint32_t num_q_heads = 0;
  std::uint32_t num_kv_heads = 0;
  std::uint32_t head_dim = 0;  ///< As compiled: 64 and 128, with an option 256.
  DType dtype = DType::bf16;   ///< Of queries, keys, values and output; bf16 alone.
  bool causal = true;          ///< The last query sees all keys, each before it one less.
  std::uint32_t window = 0;    ///< A query sees its own key and `window - 1` before it; 0: all. Needs `causal`.
  float soft_cap = 0;          ///< Scores become cap · tanh(score / cap); 0: none.
  float scale = 0;             ///< 0: 1 / sqrt(head_dim).
  friend bool operator==(const AttentionShape&, const AttentionShape&) = default;
};

enum class Kernel : std::uint8_t {
  automatic,     ///< By what was measured.
  cuda_cores,    ///< One query for each sequence, 1, 2, 3, 4 or 8 query heads to a key head.
  tensor_cores,  ///< Any number of queries.
  hopper,        ///< wgmma: many queries, compute capability 9.0, the variants of this build.
};
std::string_view to_string(Kernel kernel) noexcept;

/// A sequence of a batch: the blocks of its table in order, how many tokens of keys and values there are, and how many of the last
/// ones have a query. Packed: no pages; rows of the sequences follow each other.
struct Sequence {
  std::span<const std::int32_t> pages{};  ///< At least those that `kv_tokens` need; more are left alone.
  std::uint32_t kv_tokens = 0;
  std::uint32_t q_tokens = 1;
};

struct PlanOptions {
  std::uint32_t page_size = 16;  ///< Tokens in a page; 0: keys and values are packed rows.
  Kernel kernel = Kernel::automatic;
  /// Above 0: runs may be captured, and a graph replays what was planned last. All memory is then allocated at the first `plan`,
  /// for this many sequences, `max_rows` queries in all and `max_pages` pages in all, and never grows. Each run and append touches
  /// all rows: `q`, `out`, `lse` and appended rows have `max_rows`, packed keys and values `max_pages`. What comes out in rows that
  /// were not planned is unspecified.
  std::uint32_t max_batch = 0;
  std::uint32_t max_rows = 0;  ///< 0: `max_batch`, one query for each sequence.
  std::uint32_t max_pages = 0;
  /// Under a graph, a page of no sequence: rows that were not planned are appended to it. Below 0: every plan fills all rows.
  std::int32_t spare_page = -1;
  friend bool operator==(const PlanOptions&, const PlanOptions&) = default;
};

/// Keys and values of one layer in pages. Strides in elements, the same for both: element (page, token, head, i) is at
/// page · page_stride + token · token_stride + head · head_stride + i.
struct KvPages {
  DevicePtr k{};
  DevicePtr v{};
  std::uint32_t num_pages = 0;
  std::uint32_t page_size = 0;
  std::uint32_t num_heads = 0;
  std::uint32_t head_dim = 0;
  DType dtype = DType::bf16;
  std::uint64_t page_stride = 0;
  std::uint64_t token_stride = 0;
  std::uint64_t head_stride = 0;
};
/// A layer of the cache as it lies; nothing is copied. Its sequences are `Sequence{.pages = table.blocks(), …}`.
/// Lifetime: until the cache is released. Errors: out_of_range (no such layer, or released), unsupported (keys and values differ in
///   heads, dimension or type, or are not bf16).
Result<KvPages> kv_pages(const PagedKvCache& cache, std::uint32_t layer,
                         std::source_location site = std::source_location::current());

/// What a run over a plan touches.
struct Extent {
  std::uint32_t rows = 0;       ///< Of queries and output.
  std::uint32_t num_pages = 0;  ///< One past the largest page that a table names.
  std::uint64_t kv_rows = 0;    ///< Of packed keys and values.
};
struct PagedCall {
  DevicePtr q{};               ///< [rows, num_q_heads, head_dim]
  std::uint64_t q_stride = 0;  ///< Elements from one row to the next; 0: packed.
  KvPages kv{};
  DevicePtr out{};  ///< [rows, num_q_heads, head_dim], packed
  DevicePtr lse{};  ///< [rows, num_q_heads] f32, the logarithm to base 2 of the sum of exponentials; may be null.
};
struct PackedCall {
  DevicePtr q{};
  std::uint64_t q_stride = 0;
  DevicePtr k{};                ///< [kv_rows, num_kv_heads, head_dim]
  DevicePtr v{};                ///< As k.
  std::uint64_t kv_stride = 0;  ///< Of k and of v; 0: packed.
  DevicePtr out{};
  DevicePtr lse{};
};
/// Keys and values of the tokens that have a query, the row of query i in row i.
struct AppendCall {
  DevicePtr k{};                 ///< [rows, num_kv_heads, head_dim]
  DevicePtr v{};                 ///< As k.
  std::uint64_t row_stride = 0;  ///< Of k and of v; 0: packed.
  KvPages kv{};
};

/// What can be refused without library or device. Errors: invalid_argument or out_of_range, with what to change.
Result<> check(const AttentionShape& shape, std::source_location site = std::source_location::current());
Result<> check(const AttentionShape& shape, const PlanOptions& options,
               std::source_location site = std::source_location::current());
Result<> check(const AttentionShape& shape, const PlanOptions& options, std::span<const Sequence> sequences,
               std::source_location site = std::source_location::current());
Result<> check(const AttentionShape& shape, const PlanOptions& options, const Extent& extent, const PagedCall& call,
               std::source_location site = std::source_location::current());
Result<> check(const AttentionShape& shape, const PlanOptions& options, const Extent& extent, const PackedCall& call,
               std::source_location site = std::source_location::current());
Result<> check(const AttentionShape& shape, const PlanOptions& options, const Extent& extent, const AppendCall& call,
               std::source_location site = std::source_location::current());

class AttentionPlan : public ModelResource {
 public:
  /// Plans for these sequences and enqueues the upload of their tables on `stream`. With the lengths in pages of the plan before,
  /// the schedule stays and only tables are uploaded; with all of them the same nothing is. Pages that lie wholly before every
  /// window are neither read nor needed.
  /// Ordering: waits for the upload before the last one, never for a kernel. A run sees the plan when it is enqueued on `stream`,
  ///   or on one ordered behind it. Not legal while `stream` is captured.
  /// Lifetime: `sequences` are read during the call.
  /// Errors: those of `check`, capture_unsafe, unsupported (no kernel of this build does it), out_of_memory. The plan before is
  ///   gone then.
  virtual Result<> plan(std::span<const Sequence> sequences, StreamHandle stream,
                        std::source_location site = std::source_location::current()) = 0;
  /// Attention over the planned batch. Ordering: as a launch; legal in a capture when the options said so.
  /// Errors: those of `check`, invalid_argument (nothing is planned), out_of_range (memory that is not known), capture_unsafe (no
  ///   graph was announced, or `stream`'s partial results would have to grow: plan on that stream), as `enqueue_native`.
  virtual Result<> run(const PagedCall& call, StreamHandle stream, std::source_location site = std::source_location::current()) = 0;
  virtual Result<> run(const PackedCall& call, StreamHandle stream,
                       std::source_location site = std::source_location::current()) = 0;
  /// Writes keys and values into the pages: those of the last `q_tokens` of each sequence. Ordering and errors: as `run`.
  virtual Result<> append(const AppendCall& call, StreamHandle stream,
                          std::source_location site = std::source_location::current()) = 0;

  virtual const AttentionShape& shape() const noexcept = 0;
  virtual const PlanOptions& options() const noexcept = 0;
  /// Of the last plan; zeros before.
  virtual Extent extent() const noexcept = 0;
  /// What the last plan runs on; automatic before.
  virtual Kernel kernel() const noexcept = 0;
  /// How often the library planned, and how often tables went to the device.
  virtual std::uint64_t num_schedules() const noexcept = 0;
  virtual std::uint64_t num_uploads() const noexcept = 0;
  /// Device memory that the plan holds by itself; partial results are in `OpCache::scratch`.
  virtual std::uint64_t size_bytes() const noexcept = 0;
};

// ---- rows ----

/// residual += x; x = residual / rms(residual) · weight, each row by itself, in float32.
struct AddNormCall {
  DevicePtr x{};         ///< [rows, columns], in and out
  DevicePtr residual{};  ///< [rows, columns], in and out
  DevicePtr weight{};    ///< [columns]
  std::uint32_t rows = 0;
  std::uint32_t columns = 0;          ///< A multiple of 8, at most 49,152.
  std::uint64_t x_stride = 0;         ///< 0: packed.
  std::uint64_t residual_stride = 0;  ///< 0: packed.
  float eps = 1e-5F;
  bool weight_plus_one = false;  ///< Gemma's form: 1 + weight.
};
Result<> check(const AddNormCall& call, std::source_location site = std::source_location::current());

/// One token a row, from softmax(logits / temperature) restricted to the `top_k` most likely and, among all, to the likeliest whose
/// sum reaches `top_p`. The same seed, offset and logits give the same tokens.
struct SampleCall {
  DevicePtr logits{};  ///< [rows, vocabulary] f32, packed
  DevicePtr tokens{};  ///< [rows] i32
  std::uint32_t rows = 0;
  std::uint32_t vocabulary = 0;
  float temperature = 1;      ///< Above 0.
  std::int32_t top_k = 0;     ///< 0: all.
  float top_p = 1;            ///< In (0, 1].
  DevicePtr temperatures{};   ///< [rows] f32, instead of `temperature`; may be null, as the next two. Not looked at.
  DevicePtr top_ks{};         ///< [rows] i32
  DevicePtr top_ps{};         ///< [rows] f32
  std::uint64_t seed = 0;     ///< Each row has its own sequence of one seed.
  std::uint64_t offset = 0;   ///< Into that sequence. Advance it by 32 or more a call.
  DevicePtr seed_device{};    ///< One u64, instead of `seed`, for graphs; may be null.
  DevicePtr offset_device{};  ///< One u64, instead of `offset`, for graphs; may be null.
};
Result<> check(const SampleCall& call, std::source_location site = std::source_location::current());

class Bridge {
 public:
  virtual ~Bridge() = default;
  Bridge(const Bridge&) = delete;
  Bridge& operator=(const Bridge&) = delete;

  /// Errors: unsupported (left out of this build, the backend has no native work, or the device none of the code: says which).
  static Result<std::unique_ptr<Bridge>> create(GpuBackend& backend, std::source_location site = std::source_location::current());

  /// A plan without a batch. It holds the backend by reference, not the bridge.
  /// Errors: those of `check`, unsupported (no kernel of this build does it: names the options that would bring it).
  virtual Result<std::unique_ptr<AttentionPlan>> make_plan(const AttentionShape& shape, const PlanOptions& options = {},
                                                           std::source_location site = std::source_location::current()) = 0;
  /// Ordering: as a launch; legal in a capture. Errors: those of `check`, as `enqueue_native`.
  virtual Result<> add_rms_norm(const AddNormCall& call, StreamHandle stream,
                                std::source_location site = std::source_location::current()) = 0;
  /// Probabilities lie in scratch of the operation and the stream: a capture needs one call of that size before it, or
  /// `prepare_sample`. Ordering: as a launch. Errors: those of `check`, capture_unsafe, as `enqueue_native`.
  virtual Result<> sample(const SampleCall& call, StreamHandle stream,
                          std::source_location site = std::source_location::current()) = 0;
  virtual Result<> prepare_sample(std::uint32_t rows, std::uint32_t vocabulary, StreamHandle stream,
                                  std::source_location site = std::source_location::current()) = 0;

 protected:
  Bridge() = default;
};

}  // namespace metrale::flashinfer
