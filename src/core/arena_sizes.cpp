// SPDX-License-Identifier: Apache-2.0
//
// What each buffer holds and how large it is. M rows are the tokens of one pass; M16 rows are M padded for block-scaled FP8 matrix
// products. e is the size of an activation. A buffer used by several paths takes the largest; 256 is the smallest buffer worth
// having where callers want a valid pointer.
#include <fmt/format.h>

#include <algorithm>

#include "core/saturating.h"
#include "metrale/arena.h"

namespace metrale {
namespace {

using detail::align_up;
using detail::ceil_div;
using detail::Count;

constexpr std::uint64_t kFloor = 256;
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
/// No buffer is believed to be larger; it also keeps their sum in 64 bits.
constexpr std::uint64_t kMaxBufferBytes = std::uint64_t{1} << 48;
/// Largest length, count or rank that is believed.
constexpr std::uint64_t kMaxDimension = std::uint64_t{1} << 32;
/// Most rows of logits computed at once.
constexpr std::uint64_t kLogitRows = 256;
/// Rows of an FP8 scale block, and columns of its tiles.
constexpr std::uint64_t kScaleBlock = 128;
constexpr std::uint64_t kSmallScaleBlock = 32;
/// Head dim that the chunked DeltaNet kernels are written for, and tokens in one of their chunks.
constexpr std::uint64_t kGdnHeadDim = 128;
constexpr std::uint64_t kChunk = 64;

// The symbols of the formulas.
struct Symbols {
  ArenaShape shape;
  ArenaLimits limits;
  ArenaLevers levers;
  Count e;                        // bytes of an activation
  Count M, M16;                   // rows
  Count h, V, I;                  // hidden, vocabulary, dense intermediate
  Count Hq, Hkv, d, g;            // heads, head dim, 2 when the queries carry a gate
  Count E, k, Im, moe_out;        // experts, experts of a token, their intermediate and output widths
  Count nv, qkvz, ba, value_dim;  // DeltaNet: value heads, projections
  Count D2;                       // Mamba-2 inner dim
  Count L, R;                     // latent attention: KV rank, rotary dim
  Count B, rows;                  // blocks of a sequence, rows of decode metadata
  bool dense;
};

Symbols symbols(const ArenaShape& shape, const ArenaLimits& limits, const ArenaLevers& levers) {
  Symbols s;
  s.shape = shape;
  s.limits = limits;
  s.levers = levers;
  s.e = shape.activation_bytes;
  s.M = limits.max_batch_tokens;
  s.M16 = align_up(s.M, 16);
  s.h = shape.hidden;
  s.V = shape.vocab;
  s.I = shape.intermediate;
  s.Hq = shape.num_heads;
  s.Hkv = shape.num_kv_heads;
  s.d = shape.head_dim;
  s.g = shape.gated_attention ? 2 : 1;
  s.E = shape.moe.num_experts;
  s.k = shape.moe.top_k;
  s.Im = shape.moe.intermediate;
  s.moe_out = shape.moe.out_dim != 0 ? shape.moe.out_dim : shape.hidden;
  const ArenaShape::Linear& linear = shape.linear;
  s.nv = linear.num_value_heads;
  s.value_dim = s.nv * linear.value_head_dim;
  s.qkvz = Count(2) * linear.num_key_heads * linear.key_head_dim + Count(2) * s.value_dim;
  s.ba = Count(2) * s.nv;
  s.D2 = shape.mamba2.inner_dim;
  s.L = shape.latent.kv_lora_rank;
  s.R = shape.latent.rope_dim;
  s.B = max_blocks_per_sequence(limits);
  s.rows = decode_rows(limits);
  s.dense = shape.moe.num_experts == 0;
  return s;
}

// Columns of the widest activation that is quantised to FP8.
Count fp8_columns(const Symbols& s) { return std::max({s.h, s.Hq * s.d, s.D2, s.value_dim}); }
// Columns of the widest activation of a dense MLP.
Count ffn_columns(const Symbols& s) { return std::max(s.h, s.I); }
// Rows that expert kernels write, whatever the batch.
Count expert_rows(const Symbols& s) { return align_up(std::max(s.M, Count(3)), 16); }
// Latent attention's wide rows; 0 without it.
Count latent_rows(const Symbols& s) { return s.L == 0 ? Count(0) : s.M * s.Hq * (s.L + s.R) * s.e; }

// Activations, their scales, the tile worklist and its counter, each aligned.
Count moe_fp8_bytes(const Symbols& s) {
  const Count columns = std::max(s.h, Count(s.shape.moe.shared_intermediate));
  const Count routed = s.M * s.k;
  const Count activations = std::max(s.M * columns, routed * s.Im);
  const Count scales = Count(4) * std::max(s.M * ceil_div(columns, kScaleBlock), routed * ceil_div(s.Im, kScaleBlock));
  const Count tiles = Count(8) * (ceil_div(routed, kScaleBlock) + s.E + 1) * ceil_div(std::max(s.h, s.Im), kChunk);
  const Count counter = 4;
  return align_up(activations, kDeviceAlignment) + align_up(scales, kDeviceAlignment) + align_up(tiles, kDeviceAlignment) +
         align_up(counter, kDeviceAlignment);
}

// Chunked DeltaNet: W, U and corrected U, the state of each chunk, and the cumulated gates.
Count gdn_bytes(const Symbols& s) {
  if (s.shape.linear.key_head_dim != kGdnHeadDim || s.shape.linear.value_head_dim != kGdnHeadDim) return 0;
  const Count chunks = (ceil_div(s.M, kChunk) + 16) * s.nv;
  return chunks * (3 * kChunk * kGdnHeadDim * 2) + chunks * (kGdnHeadDim * kGdnHeadDim * 2) + chunks * (kChunk * 4);
}

Count ssd_bytes(const Symbols& s) {
  if (s.D2 == 0) return 0;
  const Count chunks = ceil_div(s.M, kChunk) + 1;
  return Count(2) * s.shape.mamba2.num_heads * chunks * kChunk * 4 + chunks * s.shape.mamba2.num_groups * kChunk * kChunk * 4;
}

Count hc_lowrank_bytes(const Symbols& s) {
  const Count hc = s.shape.hyper.num_streams;
  if (hc == 0) return kFloor;
  const Count rank = s.shape.hyper.rank;
  return std::max(std::min(s.M, Count(64)) * (hc * s.h + rank) * 4,
                  std::min(s.M, Count(2048)) * (Count(2) * hc * s.h + rank + hc) * s.e);
}

Count qsa_bytes(const Symbols& s) {
  const ArenaShape::Indexer& indexer = s.shape.indexer;
  if (indexer.num_heads == 0) return kFloor;
  const Count n = indexer.num_heads;
  const Count a = indexer.head_dim;
  const std::uint64_t ratio = std::max<std::uint64_t>(indexer.compress_ratio, 1);
  return Count(2048) * ((n + 1) * a * 2 + n * a * 4 + ceil_div(s.limits.max_seq_len, ratio) * 4 + Count(indexer.top_k / ratio) * 4);
}

// The step's small inputs. Four layouts, each rewritten by its user before use, so the largest serves all.
Count scratch_bytes(const Symbols& s) {
  const Count P = s.shape.position_streams;
  const Count smallest = 64 * 1024;
  // Prefill: expert ids and weights; positions, KV slots; block table; length.
  const Count prefill = align_up(align_up(Count(2) * s.M * s.k * 4 + align_up(s.M * 4 * P, 8) + s.M * 8, 4) + s.B * 4, 4) + 4;
  // Decode and verify.
  const Count decode =
      Count(kDecodeMetadataOffset) + std::max(Count(256 * 24) + Count(256) * s.B * 4, Count(24) * s.rows + s.rows * s.B * 4);
  // Batched prefill of n streams of c tokens.
  const Count n = 8;
  const Count c = ceil_div(s.M, n.value());
  const Count T = n * c;
  const Count batched = align_up(T * s.k * 8, 64) + n * align_up(align_up(c * 4 * P, 8) + c * 8, 64) + P * align_up(T * 4, 8) +
                        align_up(T * 8, 8) + Count(2) * align_up(n * 8, 8) + align_up((n + 1) * 4, 8) + align_up(n * 4, 8) + n * 8;
  return std::max({smallest, prefill, decode, batched});
}

struct Row {
  ArenaBuffer buffer;
  std::string_view name;
  Count (*bytes)(const Symbols&);
};

// clang-format off
constexpr std::array<Row, kNumArenaBuffers> kRows{{
    // The stream of activations and its norm. [M, h]
    {ArenaBuffer::hidden_states, "hidden_states", [](const Symbols& s) { return s.M * s.h * s.e; }},
    {ArenaBuffer::residual, "residual", [](const Symbols& s) { return s.M * s.h * s.e; }},
    {ArenaBuffer::norm_output, "norm_output", [](const Symbols& s) { return s.M * std::max(s.h, s.D2) * s.e; }},
    {ArenaBuffer::norm_unit_w, "norm_unit_w", [](const Symbols& s) { return std::max(s.h, s.D2) * s.e; }},

    // Attention: queries (with gates), keys, values [M16, (Hq g + 2 Hkv) d]; its output [M, Hq d].
    {ArenaBuffer::qkv_output, "qkv_output", [](const Symbols& s) { return s.M16 * (s.Hq * s.g + Count(2) * s.Hkv) * s.d * s.e; }},
    {ArenaBuffer::attn_output, "attn_output",
     [](const Symbols& s) { return std::max({s.M * s.Hq * s.d * s.e, s.M * s.D2 * s.e, latent_rows(s)}); }},
    {ArenaBuffer::splitk_workspace, "splitk_workspace",
     [](const Symbols& s) { return Count(s.limits.num_splitk_slots) * (s.d + 2) * 4; }},

    // Experts: router scores and input, their rows, their sum. Dense models use the three projections for their MLP.
    {ArenaBuffer::gate_logits, "gate_logits",
     [](const Symbols& s) { return s.dense ? Count(kFloor) : s.M * (s.E + s.shape.moe.num_zero_experts) * s.e; }},
    {ArenaBuffer::gate_logits_f32, "gate_logits_f32",
     [](const Symbols& s) { return s.dense ? Count(kFloor) : s.M * (s.E + s.shape.moe.num_zero_experts) * 4; }},
    {ArenaBuffer::moe_router_in_f32, "moe_router_in_f32", [](const Symbols& s) { return s.dense ? Count(kFloor) : s.M * s.h * 4; }},
    {ArenaBuffer::moe_output, "moe_output", [](const Symbols& s) { return s.M16 * s.h * s.e; }},
    {ArenaBuffer::expert_gate_out, "expert_gate_out",
     [](const Symbols& s) { return expert_rows(s) * (s.dense ? s.I * s.e : std::max(s.k * s.Im, s.I) * 4); }},
    {ArenaBuffer::expert_up_out, "expert_up_out",
     [](const Symbols& s) { return expert_rows(s) * (s.dense ? s.I * s.e : std::max(s.k * s.Im, s.I) * 4); }},
    {ArenaBuffer::expert_down_out, "expert_down_out",
     [](const Symbols& s) { return expert_rows(s) * (s.dense ? s.h : s.k * s.moe_out) * s.e; }},
    {ArenaBuffer::moe_fp8_scratch, "moe_fp8_scratch", [](const Symbols& s) { return s.dense ? Count(0) : moe_fp8_bytes(s); }},

    // Ends of the pass: scores of the rows that are sampled, token ids, the step's small inputs.
    {ArenaBuffer::logits, "logits",
     [](const Symbols& s) { return std::min(s.M, std::max(Count(kLogitRows), s.rows + 1)) * s.V * s.e; }},
    {ArenaBuffer::token_ids, "token_ids", [](const Symbols& s) { return std::max(s.M * 4, Count(kFloor)); }},
    {ArenaBuffer::scratch, "scratch", scratch_bytes},

    // Recurrent layers; between their uses the buffers serve latent attention and experts.
    {ArenaBuffer::ssm_qkvz, "ssm_qkvz",
     [](const Symbols& s) {
       return std::max({s.M16 * s.qkvz * s.e, s.M * s.shape.mamba2.in_proj_dim * s.e, (s.M + s.M16) * s.Hkv * s.d * s.e,
                        s.M * s.shape.moe.shared_intermediate * s.e, Count(kFloor)});
     }},
    {ArenaBuffer::ssm_ba, "ssm_ba",
     [](const Symbols& s) {
       const Count latent = s.L == 0 ? Count(0) : s.M * std::max(s.R, Count(s.shape.latent.q_lora_rank)) * s.e;
       return std::max({s.M * s.ba * s.e, s.M * s.shape.moe.latent_dim * s.e, latent, std::min(s.M, Count(128)) * 2 * s.h * s.e,
                        Count(kFloor)});
     }},
    {ArenaBuffer::ssm_deinterleaved, "ssm_deinterleaved",
     [](const Symbols& s) {
       return std::max({s.M16 * s.qkvz * s.e, s.M * s.shape.mamba2.xbc_dim * s.e, s.M * s.Hq * s.d * s.e, latent_rows(s),
                        Count(kFloor)});
     }},
    {ArenaBuffer::ssm_gates, "ssm_gates",
     [](const Symbols& s) { return std::max({s.M * s.nv * 2 * 4, std::min(s.M, Count(128)) * s.h * s.e, Count(kFloor)}); }},
    {ArenaBuffer::ssm_conv_out_f32, "ssm_conv_out_f32",
     [](const Symbols& s) { return std::max({s.M * s.qkvz * 4, s.L == 0 ? Count(0) : s.M * s.Hq * s.R * s.e, Count(kFloor)}); }},
    {ArenaBuffer::gdn_fla_scratch, "gdn_fla_scratch", gdn_bytes},
    {ArenaBuffer::ssd_scratch, "ssd_scratch", ssd_bytes},
    {ArenaBuffer::ssm_rowwise_w_bf16, "ssm_rowwise_w_bf16",
     [](const Symbols& s) {
       return s.levers.fp8_rowwise ? Count(s.shape.linear.num_layers) * (s.qkvz * s.h + s.h * s.value_dim) * 2 : Count(0);
     }},

    // Output latents, hyper-connections, sparse-attention selection.
    {ArenaBuffer::o_latent, "o_latent",
     [](const Symbols& s) {
       return std::max(s.M * s.shape.output_latent.num_groups * s.shape.output_latent.lora_rank * s.e, Count(kFloor));
     }},
    {ArenaBuffer::hc_streams, "hc_streams",
     [](const Symbols& s) { return std::max(s.M * s.shape.hyper.num_streams * s.h * 4, Count(kFloor)); }},
    {ArenaBuffer::hc_post, "hc_post",
     [](const Symbols& s) { return std::max(s.M * s.shape.hyper.num_streams * 4, Count(kFloor)); }},
    {ArenaBuffer::hc_comb, "hc_comb",
     [](const Symbols& s) { return std::max(s.M * s.shape.hyper.num_streams * s.shape.hyper.num_streams * 4, Count(kFloor)); }},
    {ArenaBuffer::hc_lowrank_scratch, "hc_lowrank_scratch", hc_lowrank_bytes},
    {ArenaBuffer::qsa_select_scratch, "qsa_select_scratch", qsa_bytes},

    // Quantised activations of a dense MLP: 8-bit blocks, FP8 with two layouts of scales; gate and up of up to 16 rows at once.
    {ArenaBuffer::ffn_act_q8, "ffn_act_q8",
     [](const Symbols& s) { return s.dense ? s.M * align_up(ffn_columns(s), 256) * 4 + kMiB : Count(0); }},
    {ArenaBuffer::ffn_act_a, "ffn_act_a", [](const Symbols& s) { return s.dense ? s.M16 * ffn_columns(s) : Count(0); }},
    {ArenaBuffer::ffn_act_scale, "ffn_act_scale",
     [](const Symbols& s) { return s.dense ? s.M16 * ceil_div(ffn_columns(s), kSmallScaleBlock) * 4 : Count(0); }},
    {ArenaBuffer::ffn_act_scale_kmajor, "ffn_act_scale_kmajor",
     [](const Symbols& s) { return s.dense ? s.M16 * ceil_div(ffn_columns(s), kScaleBlock) * 4 : Count(0); }},
    {ArenaBuffer::ffn_gate_up_fused, "ffn_gate_up_fused",
     [](const Symbols& s) { return s.dense ? Count(16) * 2 * s.I * s.e : Count(0); }},

    // Quantised activations elsewhere. One layout of scales is written from the other, so they never share memory.
    {ArenaBuffer::fp8_act, "fp8_act", [](const Symbols& s) { return s.M16 * fp8_columns(s); }},
    {ArenaBuffer::fp8_act_scale, "fp8_act_scale",
     [](const Symbols& s) { return s.M16 * ceil_div(fp8_columns(s), kScaleBlock) * 4; }},
    {ArenaBuffer::fp8_act_scale_kmajor, "fp8_act_scale_kmajor",
     [](const Symbols& s) { return s.M16 * ceil_div(fp8_columns(s), kScaleBlock) * 4; }},

    // Adapters: x A, (x A) B, the MLP's hidden rows, the adapter of each row.
    {ArenaBuffer::lora_xa, "lora_xa", [](const Symbols& s) { return s.M * s.levers.adapter_rank * s.e; }},
    {ArenaBuffer::lora_delta, "lora_delta",
     [](const Symbols& s) { return s.levers.adapter_rank == 0 ? Count(0) : s.M * std::max({s.h, s.I, s.g * s.Hq * s.d}) * s.e; }},
    {ArenaBuffer::lora_hact, "lora_hact", [](const Symbols& s) { return s.levers.adapter_rank == 0 ? Count(0) : s.M * s.I * s.e; }},
    {ArenaBuffer::lora_seq_slot, "lora_seq_slot", [](const Symbols& s) { return s.levers.adapter_rank == 0 ? Count(0) : s.M * 4; }},

    // 2-bit weights: the widest matrix in bf16, or its activations in 8 bits.
    {ArenaBuffer::q2_dequant_scratch, "q2_dequant_scratch",
     [](const Symbols& s) {
       if (!s.levers.q2_native) return Count(0);
       return s.h * std::max({s.I, s.qkvz, Count(s.shape.mamba2.in_proj_dim), s.Hq * s.g * s.d, Count(2) * s.Hkv * s.d}) * 2;
     }},
    {ArenaBuffer::q2_act_q8, "q2_act_q8",
     [](const Symbols& s) {
       return s.levers.q2_int8_matmul ? s.M * align_up(std::max({s.h, s.I, s.Hq * s.d}), 256) * 4 + kMiB : Count(0);
     }},
}};
// clang-format on

constexpr bool rows_are_in_order() {
  for (std::size_t i = 0; i < kRows.size(); ++i) {
    if (static_cast<std::size_t>(kRows[i].buffer) != i) return false;
  }
  return true;
}
static_assert(rows_are_in_order(), "the table is indexed by ArenaBuffer");

}  // namespace

std::string_view to_string(ArenaBuffer buffer) noexcept {
  const auto i = static_cast<std::size_t>(buffer);
  return i < kRows.size() ? kRows[i].name : "unknown";
}

std::uint64_t ArenaSizes::total_bytes() const noexcept {
  std::uint64_t sum = 0;
  for (const std::uint64_t bytes : bytes_) sum += bytes;
  return sum;
}

ArenaSizes ArenaSizes::only(std::initializer_list<ArenaBuffer> wanted) const noexcept {
  ArenaSizes kept;
  for (const ArenaBuffer buffer : wanted) kept[buffer] = (*this)[buffer];
  return kept;
}

DecodeMetadataLayout decode_metadata_layout(const ArenaLimits& limits) noexcept {
  const std::uint64_t rows = decode_rows(limits);
  const std::uint64_t start = kDecodeMetadataOffset;
  // Eight bytes are kept for each length, of which four are used.
  return {.positions = start,
          .adapter_slots = start + 4 * rows,
          .kv_slots = start + 8 * rows,
          .seq_lens = start + 16 * rows,
          .block_tables = start + 24 * rows,
          .end = start + 24 * rows + 4 * rows * max_blocks_per_sequence(limits)};
}

Result<ArenaSizes> arena_sizes(const ArenaShape& shape, const ArenaLimits& limits, const ArenaLevers& levers,
                               std::source_location site) {
  if (shape.hidden == 0 || shape.vocab == 0 || limits.max_batch_tokens == 0 || shape.activation_bytes == 0) {
    return Error(Errc::invalid_argument,
                 fmt::format("arena sizes: hidden {}, vocab {}, batch tokens {}, activation bytes {}: none of them may be 0",
                             shape.hidden, shape.vocab, limits.max_batch_tokens, shape.activation_bytes),
                 site);
  }
  for (const std::uint64_t n : {limits.max_batch_tokens, limits.max_seq_len, limits.max_batch_size}) {
    if (n > kMaxDimension) {
      return Error(Errc::invalid_argument,
                   fmt::format("arena sizes: a limit of {} tokens or sequences; at most {}", n, kMaxDimension), site);
    }
  }
  const Symbols s = symbols(shape, limits, levers);
  ArenaSizes sizes;
  for (const Row& row : kRows) {
    const std::uint64_t bytes = row.bytes(s).value();
    if (bytes > kMaxBufferBytes) {
      return Error(Errc::invalid_argument,
                   fmt::format("arena buffer {} would take more than {} TiB; check the model's shape and the batch limits",
                               row.name, kMaxBufferBytes >> 40),
                   site);
    }
    sizes[row.buffer] = bytes;
  }
  return sizes;
}

}  // namespace metrale
