// SPDX-License-Identifier: Apache-2.0
//
// Which launch the CUDA matrix kernels want: pure functions, checked where there is no device.
#include <gtest/gtest.h>

#include <string>

#include "kernels/cuda/include/matmul_plan.h"

namespace metrale::cuda::matmul {
namespace {

constexpr std::uint32_t kChip = 132;
constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16, DType::q4_0, DType::q4_1, DType::q8_0, DType::q4_k, DType::q6_k};

LinearParams one(DType type, std::uint32_t n, std::uint32_t k) {
  LinearParams p;
  p.m = 1;
  p.k = p.ld_x = k;
  p.w[0] = {.n = n, .dtype = static_cast<std::uint32_t>(type), .packed = can_repack(type, k), .ld_y = n};
  return p;
}

TEST(CudaMatmulPlan, OneRowHasAnEntryOfItsType) {
  for (const DType type : kTypes) {
    for (const std::uint32_t n : {1U, 37U, 576U, 4096U, 128256U}) {
      for (const std::uint32_t k : {256U, 1536U, 4096U, 9728U, 14336U}) {
        for (const std::string function : {"linear", "linear4", "swiglu"}) {
          SCOPED_TRACE(std::string(to_string(type)) + " " + function + " " + std::to_string(n) + " x " + std::to_string(k));
          LinearParams p = one(type, n, k);
          p.w[1] = p.w[0];
          const Plan plan = plan_linear(function, p, kChip);
          ASSERT_GE(plan.entry, 0);
          EXPECT_EQ(plan.function, kEntries[plan.entry]);
          EXPECT_TRUE(plan.function.starts_with(function + "_" + std::string(to_string(type)) + "_1")) << plan.function;
          const bool few = plan.function.ends_with("_few");
          // As the kernels are compiled, and the barriers that teams have.
          EXPECT_EQ(plan.block.x % 32, 0U);
          EXPECT_LE(plan.block.x * plan.block.y, one_threads(type, few));
          EXPECT_LE(plan.block.y, 15U);
          EXPECT_LE(plan.shared_bytes, kSharedLimit);
          // All blocks at once, as the registers allow.
          if (plan.grid.x > kChip * kOneBlocks) {
            EXPECT_LE(div_ceil(plan.grid.x, kChip) * plan.block.x * plan.block.y, kOneBlocks * one_threads(type, few));
          }
          // Where rows are few, a team's threads have one chunk each.
          if (few) {
            EXPECT_GE(plan.block.x * chunk_elements(type), k);
          }
        }
      }
    }
  }
}

TEST(CudaMatmulPlan, FewRowsAreThoseOfSmallMatrices) {
  EXPECT_EQ(plan_linear("linear", one(DType::bf16, 576, 1536), kChip).function, "linear_bf16_1_few");
  EXPECT_EQ(plan_linear("swiglu", one(DType::bf16, 1536, 576), kChip).function, "swiglu_bf16_1_few");
  EXPECT_EQ(plan_linear("linear", one(DType::bf16, 49152, 576), kChip).function, "linear_bf16_1");
  EXPECT_EQ(plan_linear("linear", one(DType::bf16, 1024, 4096), kChip).function, "linear_bf16_1");  // two chunks a thread
}

TEST(CudaMatmulPlan, BlocksThatAreSmallerAreMore) {
  const Plan narrow = plan_linear("linear", one(DType::bf16, 151936, 2560), kChip);  // 320 chunks: two rounds of 160
  EXPECT_EQ(narrow.block.x, 160U);
  EXPECT_EQ(narrow.grid.x, kChip * 3);
  EXPECT_EQ(plan_linear("linear", one(DType::bf16, 128256, 4096), kChip).grid.x, kChip * kOneBlocks);
}

TEST(CudaMatmulPlan, WhatNoEntryTakesGoesToTheGeneralKernel) {
  LinearParams p = one(DType::bf16, 64, 576);
  p.w[1] = p.w[0];
  p.w[1].dtype = static_cast<std::uint32_t>(DType::f16);
  EXPECT_EQ(plan_linear("linear4", p, kChip).function, "linear4");                        // two types
  EXPECT_EQ(plan_linear("linear", one(DType::bf16, 64, 100), kChip).function, "linear");  // no whole chunks
  p = one(DType::q8_0, 64, 576);
  p.w[0].packed = 0;
  EXPECT_EQ(plan_linear("linear", p, kChip).function, "linear");
  p = one(DType::bf16, 64, 576);
  p.m = 2;
  EXPECT_EQ(plan_linear("linear", p, kChip).function, "linear");
  // A row of x that fits into no block.
  EXPECT_EQ(plan_linear("linear", one(DType::bf16, 64, 65536), kChip).function, "linear");
}

TEST(CudaMatmulPlan, PreparedRowsOfBf16HaveTheirEntry) {
  LinearParams p = one(DType::bf16, 4096, 4096);
  p.prepared = 1;
  for (const std::uint32_t m : {5U, 32U, 33U, 2048U}) {
    p.m = m;
    EXPECT_EQ(plan_linear("linear", p, kChip).function, "linear_bf16_n") << m;
  }
  p.precision = static_cast<std::uint32_t>(Precision::exact);
  EXPECT_EQ(plan_linear("linear", p, kChip).function, "linear");
  p = one(DType::q4_k, 4096, 4096);
  p.m = 5;
  p.prepared = 1;
  EXPECT_EQ(plan_linear("linear", p, kChip).function, "linear");
}

}  // namespace
}  // namespace metrale::cuda::matmul
