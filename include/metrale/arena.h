// SPDX-License-Identifier: Apache-2.0
//
// BufferArena: the intermediate tensors of a forward pass, allocated once for a model so that the addresses in captured graphs stay
// valid and the step loop allocates nothing. One table of (name, size, pointer) drives sizing, allocation, release, reports and
// tests. Sizing is a pure function, for any thread; an arena is made and released by one thread, and any may read its pointers
// between.
//
// It is for engines: its table has the buffers of production kernels (mixture of experts, low-bit activations, adapters), each a
// block of its own that the ledger counts as live. The reference decoders do not use it: their few f32 activations and recurrent
// states are others, and lie in one block each of a private helper.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <source_location>
#include <string>
#include <string_view>

#include "metrale/backend.h"
#include "metrale/device_buffer.h"
#include "metrale/model_resource.h"
#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale {

/// Every buffer an arena may hold. What is in each, and its size, is beside its formula in arena_sizes.cpp.
// clang-format off
enum class ArenaBuffer : std::uint8_t {
  hidden_states, residual, norm_output, norm_unit_w, qkv_output, attn_output, splitk_workspace,
  gate_logits, gate_logits_f32, moe_router_in_f32, moe_output, expert_gate_out, expert_up_out, expert_down_out, moe_fp8_scratch,
  logits, token_ids, scratch,
  ssm_qkvz, ssm_ba, ssm_deinterleaved, ssm_gates, ssm_conv_out_f32, gdn_fla_scratch, ssd_scratch, ssm_rowwise_w_bf16,
  o_latent, hc_streams, hc_post, hc_comb, hc_lowrank_scratch, qsa_select_scratch,
  ffn_act_q8, ffn_act_a, ffn_act_scale, ffn_act_scale_kmajor, ffn_gate_up_fused,
  fp8_act, fp8_act_scale, fp8_act_scale_kmajor,
  lora_xa, lora_delta, lora_hact, lora_seq_slot,
  q2_dequant_scratch, q2_act_q8,
};
// clang-format on
inline constexpr std::size_t kNumArenaBuffers = static_cast<std::size_t>(ArenaBuffer::q2_act_q8) + 1;

/// The enumerator's name, e.g. "qkv_output".
std::string_view to_string(ArenaBuffer buffer) noexcept;

/// The shape of a model as buffers see it. A part that the model lacks stays 0.
struct ArenaShape {
  std::uint64_t hidden = 0;            ///< h
  std::uint64_t vocab = 0;             ///< V
  std::uint64_t intermediate = 0;      ///< I, of the dense MLP
  std::uint64_t activation_bytes = 2;  ///< Bytes of one activation: 2 for bf16, 4 for f32.

  std::uint64_t num_heads = 0;         ///< Hq
  std::uint64_t num_kv_heads = 0;      ///< Hkv
  std::uint64_t head_dim = 0;          ///< d
  bool gated_attention = false;        ///< The query projection carries an output gate: g = 2, else 1.
  std::uint64_t position_streams = 1;  ///< P: 3 under multi-axis rotary embedding.

  /// Gated DeltaNet layers.
  struct Linear {
    std::uint64_t num_layers = 0;
    std::uint64_t num_key_heads = 0;
    std::uint64_t num_value_heads = 0;
    std::uint64_t key_head_dim = 0;
    std::uint64_t value_head_dim = 0;
    constexpr std::uint64_t value_dim() const noexcept { return num_value_heads * value_head_dim; }
    /// Queries, keys, values and the output gate, together.
    constexpr std::uint64_t qkvz() const noexcept { return 2 * num_key_heads * key_head_dim + 2 * value_dim(); }
    /// The two gates of each value head.
    constexpr std::uint64_t ba() const noexcept { return 2 * num_value_heads; }
  } linear;

  struct Mamba2 {
    std::uint64_t inner_dim = 0;  ///< D2
    std::uint64_t num_heads = 0;
    std::uint64_t num_groups = 0;
    std::uint64_t in_proj_dim = 0;
    std::uint64_t xbc_dim = 0;
  } mamba2;

  /// Multi-head latent attention.
  struct Latent {
    std::uint64_t kv_lora_rank = 0;  ///< L
    std::uint64_t rope_dim = 0;      ///< R
    std::uint64_t q_lora_rank = 0;
  } latent;

  struct Moe {
    std::uint64_t num_experts = 0;  ///< E; 0: dense
    std::uint64_t num_zero_experts = 0;
    std::uint64_t top_k = 0;         ///< k
    std::uint64_t intermediate = 0;  ///< Im
    std::uint64_t shared_intermediate = 0;
    std::uint64_t latent_dim = 0;  ///< Of experts that work in a narrower space.
    std::uint64_t out_dim = 0;     ///< Width of an expert's output; 0: h
  } moe;

  struct HyperConnections {
    std::uint64_t num_streams = 0;  ///< hc
    std::uint64_t rank = 0;
  } hyper;

  /// Low-rank output projection.
  struct OutputLatent {
    std::uint64_t num_groups = 0;
    std::uint64_t lora_rank = 0;
  } output_latent;

  /// Sparse-attention indexer.
  struct Indexer {
    std::uint64_t num_heads = 0;
    std::uint64_t head_dim = 0;
    std::uint64_t compress_ratio = 0;
    std::uint64_t top_k = 0;
  } indexer;
};

/// How much of it runs at once.
struct ArenaLimits {
  std::uint64_t max_batch_tokens = 1;  ///< M: rows of one forward pass.
  std::uint64_t max_seq_len = 0;
  std::uint64_t kv_block_size = 16;  ///< Tokens in a KV block.
  std::uint64_t max_batch_size = 1;  ///< Sequences decoded together.
  /// Partial results of split attention: one (o[d], m, l) of float for each sequence, query head and split. The dispatcher's policy
  /// gives the number; a second policy here would let the kernel write past the end.
  std::uint64_t num_splitk_slots = 0;
};

/// What optional paths are taken. Parameters and not environment switches, so that sizing stays pure.
struct ArenaLevers {
  bool q2_native = false;          ///< 2-bit weights, dequantised into scratch.
  bool q2_int8_matmul = false;     ///< 2-bit weights times 8-bit activations.
  bool fp8_rowwise = false;        ///< Row-wise FP8 of the recurrent projections, with a bf16 copy.
  std::uint64_t adapter_rank = 0;  ///< Low-rank adapters; 0: none.
};

/// Sizes in bytes, by buffer; 0: gated off, its pointer stays null.
class ArenaSizes {
 public:
  std::uint64_t operator[](ArenaBuffer buffer) const noexcept { return bytes_[static_cast<std::size_t>(buffer)]; }
  std::uint64_t& operator[](ArenaBuffer buffer) noexcept { return bytes_[static_cast<std::size_t>(buffer)]; }
  std::uint64_t total_bytes() const noexcept;
  /// These sizes with every buffer but the named ones gated off: an engine allocates what its own kernels use.
  ArenaSizes only(std::initializer_list<ArenaBuffer> wanted) const noexcept;
  friend bool operator==(const ArenaSizes&, const ArenaSizes&) = default;

 private:
  std::array<std::uint64_t, kNumArenaBuffers> bytes_{};
};

/// Rows of a buffer that a block-scaled FP8 matrix product touches: `rows` rounded up to 16, because the padded count is what the
/// library is given, and it reads and writes the padding.
constexpr std::uint64_t padded_rows(std::uint64_t rows) noexcept { return round_up(rows, 16); }

/// Rows of the block table and other decode metadata: at least 32.
constexpr std::uint64_t decode_rows(const ArenaLimits& limits) noexcept {
  return limits.max_batch_size > 32 ? limits.max_batch_size : 32;
}
/// Entries in a row of the block table; 256 when the block size is unknown.
constexpr std::uint64_t max_blocks_per_sequence(const ArenaLimits& limits) noexcept {
  return limits.kv_block_size == 0 ? 256 : limits.max_seq_len / limits.kv_block_size + 1;
}

/// Bytes at the start of `scratch` that decode metadata leaves to other uses.
inline constexpr std::uint64_t kDecodeMetadataOffset = 32768;

/// Where decode metadata lies, in bytes from the start of `scratch`. R = decode_rows: positions u32 [R], adapter slots i32 [R], KV
/// slots i64 [R], sequence lengths i32 [R], block tables i32 [R, max_blocks_per_sequence].
struct DecodeMetadataLayout {
  std::uint64_t positions = 0;
  std::uint64_t adapter_slots = 0;
  std::uint64_t kv_slots = 0;
  std::uint64_t seq_lens = 0;
  std::uint64_t block_tables = 0;
  std::uint64_t end = 0;
};
DecodeMetadataLayout decode_metadata_layout(const ArenaLimits& limits) noexcept;

/// The size of every buffer. Allocates nothing.
/// Errors: invalid_argument (no tokens, hidden size or vocabulary; or a size past 2^48 bytes: names the buffer).
Result<ArenaSizes> arena_sizes(const ArenaShape& shape, const ArenaLimits& limits, const ArenaLevers& levers = {},
                               std::source_location site = std::source_location::current());

class BufferArena final : public ModelResource {
 public:
  /// Allocates each buffer at exactly its size and fills `norm_unit_w` with zeros: norms multiply by 1 + weight, so that one is
  /// plain.
  /// Ordering: blocks; not legal on a thread that holds a capture.
  /// Errors: as `GpuBackend::alloc`, naming the buffer; what was allocated before is given back.
  static Result<std::unique_ptr<BufferArena>> create(GpuBackend& backend, const ArenaSizes& sizes,
                                                     std::source_location site = std::source_location::current());
  BufferArena(const BufferArena&) = delete;
  BufferArena& operator=(const BufferArena&) = delete;
  /// Releases what is left; failures are logged.
  ~BufferArena() override;

  /// The buffer, or null when it is gated off or was released.
  DevicePtr operator[](ArenaBuffer buffer) const noexcept { return buffers_[static_cast<std::size_t>(buffer)].ptr(); }
  std::uint64_t size_bytes(ArenaBuffer buffer) const noexcept { return buffers_[static_cast<std::size_t>(buffer)].size_bytes(); }
  std::uint64_t total_bytes() const noexcept;
  /// A line for each buffer that is held, largest first, and the total.
  std::string report() const;

  std::string_view label() const noexcept override { return "buffer arena"; }
  /// Frees every buffer and goes on after failures. A buffer that a graph names is kept for the next call; all others are null
  /// then.
  /// Errors: the first, naming the buffer; invalid_argument (another backend: nothing is done).
  Result<> release(GpuBackend& backend) override;

 private:
  explicit BufferArena(GpuBackend& backend) noexcept : backend_(&backend) {}

  GpuBackend* backend_;
  std::array<DeviceBuffer, kNumArenaBuffers> buffers_;
};

}  // namespace metrale
