// SPDX-License-Identifier: Apache-2.0
//
// Between the bridge, compiled by the host's compiler, and FlashInfer's templates, compiled by nvcc: plain structs, and a table of
// the instances of this build. Nothing here knows a backend. The namespace is not metrale::flashinfer, because FlashInfer's macros
// write `flashinfer::` without a leading `::`. Every function catches what FlashInfer throws and is called with the device current.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace metrale::fi {

/// What of FlashInfer's attention an instance was compiled with. `window` can do without one, and is slower; `window_and_cap`
/// always caps.
enum class Variant : std::uint8_t { plain, window, window_and_cap };

/// How a call ended: `cuda` is a cudaError_t, `text` the words of an exception or of that code. Both empty: well.
struct Outcome {
  int cuda = 0;
  std::string text;
  bool ok() const noexcept { return cuda == 0 && text.empty(); }
};

/// Keys and values in pages, and the tables of a batch; strides in elements. Addresses are the device's.
struct Pages {
  void* k = nullptr;
  void* v = nullptr;
  std::uint64_t page_stride = 0;
  std::uint64_t token_stride = 0;
  std::uint64_t head_stride = 0;
  std::uint32_t page_size = 0;
  std::uint32_t num_heads = 0;
  std::uint32_t head_dim = 0;
  std::int32_t* indices = nullptr;
  std::int32_t* indptr = nullptr;         // [batch + 1]
  std::int32_t* last_page_len = nullptr;  // [batch]
};

/// A batch as planning sees it. The tables are the host's.
struct PlanArgs {
  std::int32_t* q_indptr = nullptr;   // [batch + 1]
  std::int32_t* kv_indptr = nullptr;  // [batch + 1], in pages; packed keys: in tokens, which are pages of one
  std::int32_t* kv_len = nullptr;     // [batch], tokens
  std::uint32_t batch = 0;
  std::uint32_t rows = 0;  // of queries; under a graph the most there can be
  std::uint32_t num_q_heads = 0;
  std::uint32_t num_kv_heads = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t page_size = 0;
  std::int32_t window_left = -1;
  bool causal = true;
  bool under_graph = false;
  void* ints_device = nullptr;
  void* ints_host = nullptr;  // pinned, read by a copy on `stream`
  std::size_t ints_bytes = 0;
  std::uint64_t stream = 0;
};
struct Planned {
  std::vector<std::int64_t> info;    // FlashInfer's own plan
  std::uint64_t partials_bytes = 0;  // of device memory that a run needs; 0: none
};

struct RunArgs {
  void* q = nullptr;  // [rows, num_q_heads, head_dim], rows `q_stride` elements apart
  void* out = nullptr;
  float* lse = nullptr;  // [rows, num_q_heads], to base 2; may be null
  std::uint64_t q_stride = 0;
  std::uint32_t rows = 0;
  std::uint32_t num_q_heads = 0;
  Pages kv;                       // packed keys and values, without tables: one page of all tokens
  std::uint64_t packed_rows = 0;  // of packed keys and values
  std::int32_t* q_indptr = nullptr;
  std::uint32_t batch = 0;
  std::int32_t window_left = -1;
  float soft_cap = 0;
  float scale = 0;
  bool causal = true;
  const std::vector<std::int64_t>* info = nullptr;
  void* ints_device = nullptr;
  void* partials = nullptr;
  std::uint64_t stream = 0;
};

/// One query for each sequence, on CUDA cores.
struct DecodeInstance {
  std::uint32_t head_dim;
  Variant variant;
  Outcome (*plan)(const PlanArgs& args, Planned& planned);
  Outcome (*run)(const RunArgs& args);
};
/// Any number of queries, on tensor cores by mma of compute capability 8.0 (`hopper` false) or by wgmma (true).
struct PrefillInstance {
  std::uint32_t head_dim;
  Variant variant;
  bool causal;
  bool hopper;
  bool packed;  // keys and values are packed rows; otherwise pages
  Outcome (*run)(const RunArgs& args);
};
std::span<const DecodeInstance* const> decode_instances() noexcept;
std::span<const PrefillInstance* const> prefill_instances() noexcept;

/// For the tensor-core kernels: FlashInfer's schedule.
Outcome plan_prefill(const PlanArgs& args, Planned& planned);
/// Ours: tiles of all heads, the longest first.
Outcome plan_hopper(const PlanArgs& args, Planned& planned);

struct AppendArgs {
  void* k = nullptr;
  void* v = nullptr;
  std::uint64_t row_stride = 0;
  std::uint32_t rows = 0;
  std::uint32_t batch = 0;
  Pages kv;
  std::int32_t* batch_indices = nullptr;  // [rows]
  std::int32_t* positions = nullptr;      // [rows], from the first page of the sequence's table
  std::uint64_t stream = 0;
};
Outcome append(const AppendArgs& args);

struct AddNormArgs {
  void* x = nullptr;
  void* residual = nullptr;
  void* weight = nullptr;
  std::uint32_t rows = 0;
  std::uint32_t columns = 0;
  std::uint32_t x_stride = 0;
  std::uint32_t residual_stride = 0;
  float eps = 0;
  bool bias_one = false;
  std::uint64_t stream = 0;
};
Outcome add_rms_norm(const AddNormArgs& args);

struct SampleArgs {
  float* logits = nullptr;
  float* probabilities = nullptr;
  float* temperatures = nullptr;
  float temperature = 1;
  std::int32_t* top_ks = nullptr;
  std::int32_t top_k = 0;
  float* top_ps = nullptr;
  float top_p = 1;
  std::int32_t* tokens = nullptr;
  bool* valid = nullptr;                 // [rows]; FlashInfer writes it without asking
  std::uint64_t* seed_device = nullptr;  // one value, instead of `seed`
  std::uint64_t seed = 0;
  std::uint64_t* offset_device = nullptr;
  std::uint64_t offset = 0;
  std::uint32_t rows = 0;
  std::uint32_t vocabulary = 0;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
  std::uint64_t stream = 0;
};
Outcome sample(const SampleArgs& args);

/// The current device.
struct Device {
  int major = 0;
  int minor = 0;
  int num_sms = 0;
};
/// Also finds out whether this build has code for it.
Outcome probe(Device& device);

}  // namespace metrale::fi
