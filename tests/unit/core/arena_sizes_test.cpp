// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <set>

#include "metrale/arena.h"

namespace metrale {
namespace {

using enum ArenaBuffer;

// Qwen3-Next-80B.
ArenaShape next80b() {
  ArenaShape s;
  s.hidden = 2048;
  s.vocab = 151'936;
  s.intermediate = 5120;
  s.num_heads = 16;
  s.num_kv_heads = 2;
  s.head_dim = 256;
  s.gated_attention = true;
  s.linear = {.num_layers = 36, .num_key_heads = 16, .num_value_heads = 32, .key_head_dim = 128, .value_head_dim = 128};
  s.moe = {.num_experts = 512, .num_zero_experts = 0, .top_k = 10, .intermediate = 512, .shared_intermediate = 512};
  return s;
}

// Dense, as SmolLM2-135M.
ArenaShape small_llama() {
  ArenaShape s;
  s.hidden = 576;
  s.vocab = 49'152;
  s.intermediate = 1536;
  s.num_heads = 9;
  s.num_kv_heads = 3;
  s.head_dim = 64;
  return s;
}

ArenaLimits one_token() { return {.max_batch_tokens = 1, .max_seq_len = 4096, .kv_block_size = 16, .max_batch_size = 32}; }

ArenaSizes sizes_of(const ArenaShape& shape, const ArenaLimits& limits, const ArenaLevers& levers = {}) {
  const Result<ArenaSizes> sizes = arena_sizes(shape, limits, levers);
  if (!sizes) throw std::runtime_error(sizes.error().to_string());
  return *sizes;
}

TEST(ArenaSizesTest, WorkedValuesOfQwen3Next80b) {
  const ArenaSizes s = sizes_of(next80b(), one_token());
  EXPECT_EQ(s[hidden_states], 4096u);
  EXPECT_EQ(s[residual], 4096u);
  EXPECT_EQ(s[norm_output], 4096u);
  EXPECT_EQ(s[norm_unit_w], 4096u);
  EXPECT_EQ(s[qkv_output], 294'912u) << "16 padded rows of (16 * 2 + 2 * 2) heads of 256 bf16";
  EXPECT_EQ(s[attn_output], 8192u);
  EXPECT_EQ(s[gate_logits], 1024u);
  EXPECT_EQ(s[gate_logits_f32], 2048u);
  EXPECT_EQ(s[logits], 303'872u);
  EXPECT_EQ(s[ssm_qkvz], 393'216u);
  EXPECT_EQ(s[ssm_deinterleaved], 393'216u);
  EXPECT_EQ(s[ssm_ba], 8192u);
  EXPECT_EQ(s[ssm_gates], 4096u);
  EXPECT_EQ(s[ssm_conv_out_f32], 12'288u * 4);
  EXPECT_EQ(s[moe_output], 16u * 2048 * 2);
  EXPECT_EQ(s[expert_gate_out], 16u * 5120 * 4) << "max(10 * 512, 5120) columns of float";
  EXPECT_EQ(s[expert_down_out], 16u * 10 * 2048 * 2);
  EXPECT_EQ(s[gdn_fla_scratch], 17u * 32 * (3 * 64 * 128 * 2 + 128 * 128 * 2 + 64 * 4));
  EXPECT_EQ(s[token_ids], 256u);
}

TEST(ArenaSizesTest, RowwiseCopyOfQwen38With27bIsTenGib) {
  ArenaShape s = small_llama();
  s.hidden = 5120;
  s.linear = {.num_layers = 48, .num_key_heads = 16, .num_value_heads = 48, .key_head_dim = 128, .value_head_dim = 128};
  EXPECT_EQ(sizes_of(s, one_token(), {.fp8_rowwise = true})[ssm_rowwise_w_bf16], 48ull * (167'772'160 + 62'914'560));
  EXPECT_EQ(sizes_of(s, one_token())[ssm_rowwise_w_bf16], 0u);
}

TEST(ArenaSizesTest, BuffersOfFp8ProductsHavePaddedRows) {
  for (const std::uint64_t rows : {1u, 15u, 16u, 17u, 500u}) {
    ArenaLimits limits = one_token();
    limits.max_batch_tokens = rows;
    const std::uint64_t padded = (rows + 15) / 16 * 16;
    EXPECT_EQ(padded_rows(rows), padded);
    const ArenaSizes s = sizes_of(small_llama(), limits);
    EXPECT_EQ(s[qkv_output], padded * (9 + 2 * 3) * 64 * 2);
    EXPECT_EQ(s[moe_output], padded * 576 * 2);
    EXPECT_EQ(s[ffn_act_a], padded * 1536);
    EXPECT_EQ(s[ffn_act_scale], padded * 48 * 4);
    EXPECT_EQ(s[ffn_act_scale_kmajor], padded * 12 * 4);
    EXPECT_EQ(s[fp8_act], padded * 576);
    EXPECT_EQ(s[fp8_act_scale], padded * 5 * 4) << "576 columns are 4.5 scale blocks";
    EXPECT_EQ(s[fp8_act_scale_kmajor], s[fp8_act_scale]);
    EXPECT_EQ(s[hidden_states], rows * 576 * 2) << "not padded";
  }
}

TEST(ArenaSizesTest, WhatAModelLacksIsGatedOff) {
  const ArenaSizes dense = sizes_of(small_llama(), one_token());
  for (const ArenaBuffer gated : {ssd_scratch, gdn_fla_scratch, moe_fp8_scratch, splitk_workspace, q2_dequant_scratch, q2_act_q8,
                                  lora_xa, lora_delta, lora_hact, lora_seq_slot, ssm_rowwise_w_bf16}) {
    EXPECT_EQ(dense[gated], 0u) << to_string(gated);
  }
  EXPECT_EQ(dense[gate_logits], 256u);
  EXPECT_EQ(dense[moe_router_in_f32], 256u);
  EXPECT_GT(dense[ffn_act_q8], 1u << 20);
  const ArenaSizes experts = sizes_of(next80b(), one_token());
  for (const ArenaBuffer gated : {ffn_act_q8, ffn_act_a, ffn_act_scale, ffn_act_scale_kmajor, ffn_gate_up_fused}) {
    EXPECT_EQ(experts[gated], 0u) << to_string(gated);
  }
  EXPECT_GT(experts[moe_fp8_scratch], 0u);
}

TEST(ArenaSizesTest, LeversOpenTheirBuffersAndNothingElse) {
  const ArenaSizes plain = sizes_of(small_llama(), one_token());
  const ArenaSizes all = sizes_of(small_llama(), one_token(), {.q2_native = true, .q2_int8_matmul = true, .adapter_rank = 8});
  EXPECT_EQ(all[q2_dequant_scratch], 576u * 1536 * 2);
  EXPECT_EQ(all[q2_act_q8], 1536u * 4 + (1 << 20));
  EXPECT_EQ(all[lora_xa], 8u * 2);
  EXPECT_EQ(all[lora_delta], 1536u * 2);
  EXPECT_EQ(all[lora_hact], 1536u * 2);
  EXPECT_EQ(all[lora_seq_slot], 4u);
  for (std::size_t i = 0; i < kNumArenaBuffers; ++i) {
    const auto id = static_cast<ArenaBuffer>(i);
    if (plain[id] == 0) continue;
    EXPECT_EQ(plain[id], all[id]) << to_string(id);
  }
}

TEST(ArenaSizesTest, LogitsHaveRowsForEverySampledToken) {
  ArenaLimits limits = one_token();
  const auto rows = [&](std::uint64_t tokens, std::uint64_t batch) {
    limits.max_batch_tokens = tokens;
    limits.max_batch_size = batch;
    return sizes_of(small_llama(), limits)[logits] / (49'152 * 2);
  };
  EXPECT_EQ(rows(1, 1), 1u);
  EXPECT_EQ(rows(4096, 1), 256u);
  EXPECT_EQ(rows(4096, 400), 401u);
  EXPECT_EQ(rows(300, 400), 300u);
}

TEST(ArenaSizesTest, ActivationsOfFourBytesDoubleWhatHoldsActivations) {
  ArenaShape s = small_llama();
  const ArenaSizes half = sizes_of(s, one_token());
  s.activation_bytes = 4;
  const ArenaSizes full = sizes_of(s, one_token());
  for (const ArenaBuffer id : {hidden_states, qkv_output, attn_output, logits, expert_gate_out, moe_output}) {
    EXPECT_EQ(full[id], 2 * half[id]) << to_string(id);
  }
  EXPECT_EQ(full[token_ids], half[token_ids]);
  EXPECT_EQ(full[fp8_act], half[fp8_act]);
}

TEST(ArenaSizesTest, OtherFamiliesFollowTheirFormulas) {
  ArenaShape s = small_llama();
  s.mamba2 = {.inner_dim = 1024, .num_heads = 16, .num_groups = 2, .in_proj_dim = 2304, .xbc_dim = 1280};
  s.latent = {.kv_lora_rank = 512, .rope_dim = 64, .q_lora_rank = 1536};
  s.hyper = {.num_streams = 4, .rank = 8};
  s.output_latent = {.num_groups = 8, .lora_rank = 128};
  s.indexer = {.num_heads = 64, .head_dim = 128, .compress_ratio = 4, .top_k = 2048};
  ArenaLimits limits = one_token();
  limits.max_batch_tokens = 100;
  limits.num_splitk_slots = 7;
  const ArenaSizes z = sizes_of(s, limits);
  EXPECT_EQ(z[norm_output], 100u * 1024 * 2);
  EXPECT_EQ(z[attn_output], 100u * 9 * (512 + 64) * 2);
  EXPECT_EQ(z[ssm_qkvz], 100u * 2304 * 2);
  EXPECT_EQ(z[ssm_deinterleaved], 100u * 9 * (512 + 64) * 2);
  EXPECT_EQ(z[ssm_ba], 100u * 1536 * 2);
  EXPECT_EQ(z[ssm_conv_out_f32], 100u * 9 * 64 * 2);
  EXPECT_EQ(z[ssd_scratch], 2u * 16 * 3 * 64 * 4 + 3 * 2 * 64 * 64 * 4);
  EXPECT_EQ(z[o_latent], 100u * 8 * 128 * 2);
  EXPECT_EQ(z[hc_streams], 100u * 4 * 576 * 4);
  EXPECT_EQ(z[hc_post], 100u * 4 * 4);
  EXPECT_EQ(z[hc_comb], 100u * 16 * 4);
  EXPECT_EQ(z[hc_lowrank_scratch], std::max(64u * (4 * 576 + 8) * 4, 100u * (2 * 4 * 576 + 8 + 4) * 2));
  EXPECT_EQ(z[qsa_select_scratch], 2048u * (65 * 128 * 2 + 64 * 128 * 4 + 1024 * 4 + 512 * 4));
  EXPECT_EQ(z[splitk_workspace], 7u * 66 * 4);
}

TEST(ArenaSizesTest, MoeFp8ScratchHoldsFourAlignedRegions) {
  const ArenaSizes z = sizes_of(next80b(), one_token());
  // M = 1: activations max(2048, 10 * 512); scales 4 * max(16, 10 * 4); tiles 8 * (1 + 512 + 1) * 32; counter.
  EXPECT_EQ(z[moe_fp8_scratch], 5120u + 256 + 131'584 + 256);
}

TEST(ArenaSizesTest, ScratchIsTheLargestOfItsFourLayouts) {
  ArenaLimits limits = one_token();
  limits.max_seq_len = 16;
  EXPECT_EQ(sizes_of(small_llama(), limits)[scratch], 64u * 1024) << "the floor";
  limits.max_seq_len = 4096;  // 257 blocks
  EXPECT_EQ(sizes_of(small_llama(), limits)[scratch], 32'768u + 256 * 24 + 256 * 257 * 4) << "decode";
  limits.max_batch_size = 1000;
  EXPECT_EQ(sizes_of(small_llama(), limits)[scratch], 32'768u + 24 * 1000 + 1000 * 257 * 4) << "decode, a large batch";
  limits.max_batch_tokens = 100'000;
  limits.max_batch_size = 1;
  limits.max_seq_len = 16;
  ArenaShape shape = next80b();
  // Batched prefill: 8 streams of 12,500 tokens, 10 experts each.
  const std::uint64_t batched = 100'000u * 80 + 8 * 150'016 + 400'000 + 800'000 + 2 * 64 + 40 + 32 + 64;
  EXPECT_EQ(sizes_of(shape, limits)[scratch], batched);
}

TEST(ArenaSizesTest, OnlyKeepsTheNamedBuffers) {
  const ArenaSizes all = sizes_of(small_llama(), one_token());
  const ArenaSizes some = all.only({hidden_states, logits});
  EXPECT_EQ(some[hidden_states], all[hidden_states]);
  EXPECT_EQ(some[logits], all[logits]);
  EXPECT_EQ(some.total_bytes(), all[hidden_states] + all[logits]);
}

TEST(ArenaSizesTest, ImpossibleShapesAreRefusedByName) {
  ArenaShape s = small_llama();
  s.vocab = 0;
  EXPECT_EQ(arena_sizes(s, one_token()).error().code(), Errc::invalid_argument);
  s = small_llama();
  EXPECT_EQ(arena_sizes(s, {.max_batch_tokens = 0}).error().code(), Errc::invalid_argument);
  EXPECT_EQ(arena_sizes(s, {.max_batch_tokens = ~0ull}).error().code(), Errc::invalid_argument);
  s.num_heads = ~0ull;
  s.head_dim = ~0ull;
  const Result<ArenaSizes> overflowing = arena_sizes(s, one_token());
  ASSERT_FALSE(overflowing.has_value());
  EXPECT_EQ(overflowing.error().code(), Errc::invalid_argument);
  EXPECT_THAT(overflowing.error().message(), testing::HasSubstr("qkv_output"));
}

TEST(ArenaSizesTest, EveryBufferHasItsOwnName) {
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < kNumArenaBuffers; ++i) names.insert(to_string(static_cast<ArenaBuffer>(i)));
  EXPECT_EQ(names.size(), kNumArenaBuffers);
  EXPECT_TRUE(names.contains("ffn_act_scale_kmajor"));
}

RC_GTEST_PROP(ArenaSizesProperty, GrowWithTheBatchAndNeverShrink, ()) {
  const ArenaShape shape = *rc::gen::arbitrary<bool>() ? next80b() : small_llama();
  ArenaLimits small;
  small.max_batch_tokens = *rc::gen::inRange<std::uint64_t>(1, 5000);
  small.max_seq_len = *rc::gen::inRange<std::uint64_t>(0, 100'000);
  small.max_batch_size = *rc::gen::inRange<std::uint64_t>(1, 300);
  ArenaLimits large = small;
  large.max_batch_tokens += *rc::gen::inRange<std::uint64_t>(0, 5000);
  large.max_seq_len += *rc::gen::inRange<std::uint64_t>(0, 100'000);
  large.max_batch_size += *rc::gen::inRange<std::uint64_t>(0, 300);
  const ArenaSizes a = sizes_of(shape, small);
  const ArenaSizes b = sizes_of(shape, large);
  for (std::size_t i = 0; i < kNumArenaBuffers; ++i) RC_ASSERT(a[static_cast<ArenaBuffer>(i)] <= b[static_cast<ArenaBuffer>(i)]);
}

RC_GTEST_PROP(ArenaSizesProperty, ScratchHoldsTheDecodeMetadata, ()) {
  ArenaLimits limits;
  limits.max_batch_size = *rc::gen::inRange<std::uint64_t>(1, 2000);
  limits.max_seq_len = *rc::gen::inRange<std::uint64_t>(0, 200'000);
  limits.kv_block_size = *rc::gen::element<std::uint64_t>(0, 1, 16, 64);
  const DecodeMetadataLayout layout = decode_metadata_layout(limits);
  const std::uint64_t rows = decode_rows(limits);
  RC_ASSERT(layout.positions + 4 * rows <= layout.adapter_slots);
  RC_ASSERT(layout.adapter_slots + 4 * rows <= layout.kv_slots);
  RC_ASSERT(layout.kv_slots % 8 == 0u);
  RC_ASSERT(layout.kv_slots + 8 * rows <= layout.seq_lens);
  RC_ASSERT(layout.seq_lens + 4 * rows <= layout.block_tables);
  RC_ASSERT(layout.block_tables + 4 * rows * max_blocks_per_sequence(limits) == layout.end);
  RC_ASSERT(layout.end <= sizes_of(small_llama(), limits)[scratch]);
}

}  // namespace
}  // namespace metrale
