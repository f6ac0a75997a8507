// SPDX-License-Identifier: Apache-2.0
//
// What entries.cpp hands to the code of one instruction set. Each ops_<isa>.cpp is compiled with its own machine flags and exports
// one table and nothing else: an inline function shared with other objects could be linked from here and run on a machine without
// these instructions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "metrale/models/decoder_kernels.h"

namespace metrale::host::decoder {

struct RotateStoreCall {
  RotateStoreParams p;
  float* q;
  float* k;
  const float* v;
  const float* q_norm;
  const float* k_norm;
  const float* rotary;
  const StepHeader* step;
  const std::int32_t* block_table;
  void* key_cache;
  void* value_cache;
  std::uint32_t token;
};

struct AttendCall {
  AttendParams p;
  const float* q;
  const void* key_cache;
  const void* value_cache;
  const StepHeader* step;
  const std::int32_t* block_table;
  float* out;
  std::uint32_t head;          ///< attend_one: this block's place among heads_blocks.
  std::uint32_t heads_blocks;  ///< Blocks along the grid's x.
  std::uint32_t tile;
  float* shared;
};

struct ConvCall {
  ConvParams p;
  float* x;
  const float* weight;
  float* state;
  const StepHeader* step;
  std::uint32_t tile;
  float* shared;
};

struct DeltaCall {
  DeltaParams p;
  const float* qkv;
  const float* z;
  const float* a;
  const float* b;
  const float* decay;
  const float* dt_bias;
  const float* norm;
  float* state;
  const StepHeader* step;
  float* out;
  std::uint32_t head;
  float* shared;
};

/// One row of logits.
struct RowCall {
  const float* logits;
  std::uint32_t n;
};
struct RowFacts {
  std::int32_t best;  ///< -1 where a logit is NaN or +inf, or all are -inf.
  float largest;
  double sum;  ///< Of exp(logit - largest), over all logits.
};

struct Ops {
  void (*rotate_store)(const RotateStoreCall&);
  void (*attend)(const AttendCall&);
  void (*attend_one)(const AttendCall&);
  void (*conv)(const ConvCall&);
  void (*delta)(const DeltaCall&);
  std::int32_t (*argmax)(const RowCall&);
  RowFacts (*row_facts)(const RowCall&);
};

extern const Ops kOpsGeneric;
#if defined(__x86_64__)
extern const Ops kOpsAvx2;
extern const Ops kOpsAvx512;
#endif

/// log(1 + exp(x)), x where it exceeds 20; exp(x); 1 / sqrt(x). Compiled once, for every instruction set.
float softplus(float x) noexcept;
float exponential(float x) noexcept;
float inverse_sqrt(double x) noexcept;

}  // namespace metrale::host::decoder
