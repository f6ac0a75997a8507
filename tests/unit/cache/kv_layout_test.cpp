// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "metrale/kv_cache.h"
#include "unit/core/two_backends.h"

namespace metrale {
namespace {

using testing::HasSubstr;

TEST(KvLayoutTest, BlockBytesFollowElementTypes) {
  const KvLayout bf16 = KvLayout::uniform(2, 3, 64, DType::bf16);
  EXPECT_EQ(bf16.block_bytes(bf16.layers[0].k), 16u * 3 * 64 * 2);
  EXPECT_EQ(bf16.bytes_per_block(), 2u * 2 * 16 * 3 * 64 * 2);
  EXPECT_EQ(KvLayout::uniform(1, 3, 64, DType::f32).bytes_per_block(), 2u * 16 * 3 * 64 * 4);
  EXPECT_EQ(KvLayout::uniform(1, 3, 64, DType::f8_e4m3, 32).bytes_per_block(), 2u * 32 * 3 * 64);
}

TEST(KvLayoutTest, SidesAndLayersMayDiffer) {
  KvLayout layout;
  layout.block_size = 8;
  layout.layers = {{{2, 64, DType::bf16}, {2, 32, DType::f8_e4m3}}, {{4, 128, DType::f32}, {1, 16, DType::bf16}}};
  ASSERT_OK(layout.validate());
  EXPECT_EQ(layout.bytes_per_block(), 8u * (2 * 64 * 2 + 2 * 32 + 4 * 128 * 4 + 16 * 2)) << "not twice the keys";
}

TEST(KvLayoutTest, WrongLayoutsAreRefusedByLayerAndSide) {
  KvLayout layout = KvLayout::uniform(2, 3, 64, DType::bf16);
  layout.layers[1].v.dtype = DType::f16;
  const Result<> f16 = layout.validate();
  EXPECT_ERRC(f16, Errc::invalid_argument);
  EXPECT_THAT(f16.error().message(), HasSubstr("layer 1 values"));
  EXPECT_THAT(f16.error().message(), HasSubstr("f16"));
  for (const DType quantised : {DType::q4_0, DType::i8, DType::f8_e5m2}) {
    EXPECT_ERRC(KvLayout::uniform(1, 1, 64, quantised).validate(), Errc::invalid_argument);
  }
  EXPECT_ERRC(KvLayout::uniform(0, 3, 64, DType::bf16).validate(), Errc::invalid_argument);
  EXPECT_ERRC(KvLayout::uniform(1, 0, 64, DType::bf16).validate(), Errc::invalid_argument);
  EXPECT_ERRC(KvLayout::uniform(1, 3, 0, DType::bf16).validate(), Errc::invalid_argument);
  EXPECT_ERRC(KvLayout::uniform(1, 3, 64, DType::bf16, 0).validate(), Errc::invalid_argument);
  constexpr std::uint32_t kHuge = std::numeric_limits<std::uint32_t>::max();
  EXPECT_ERRC(KvLayout::uniform(1, kHuge, kHuge, DType::f32, kHuge).validate(), Errc::invalid_argument);
}

TEST(KvLayoutTest, NumBlocksIsWhatFitsInAllLayersTogether) {
  const KvLayout layout = KvLayout::uniform(2, 3, 64, DType::bf16);
  const std::uint64_t each = layout.bytes_per_block();
  EXPECT_EQ(*compute_num_blocks(each, layout), 1u);
  EXPECT_EQ(*compute_num_blocks(each * 10 - 1, layout), 9u);
  EXPECT_EQ(*compute_num_blocks(each * 10, layout), 10u);
  EXPECT_EQ(*compute_num_blocks(~std::uint64_t{0}, KvLayout::uniform(1, 1, 1, DType::f8_e4m3, 1)),
            static_cast<std::uint32_t>(std::numeric_limits<std::int32_t>::max()));
  EXPECT_ERRC(compute_num_blocks(0, layout), Errc::out_of_memory);
  const Result<std::uint32_t> small = compute_num_blocks(each - 1, layout);
  EXPECT_ERRC(small, Errc::out_of_memory);
  EXPECT_THAT(small.error().message(), HasSubstr(std::to_string(each)));
  EXPECT_ERRC(compute_num_blocks(1 << 20, KvLayout{}), Errc::invalid_argument);
}

}  // namespace
}  // namespace metrale
