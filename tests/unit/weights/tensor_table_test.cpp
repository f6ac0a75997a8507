// SPDX-License-Identifier: Apache-2.0
#include "weights/tensor_table.h"

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

namespace metrale::weights {
namespace {

TEST(TensorTable, NearestNamesRanksByEditDistance) {
  const std::vector<std::string_view> names{"model.norm.weight", "model.layers.0.mlp.up_proj.weight",
                                            "model.layers.1.mlp.up_proj.weight", "lm_head.weight"};
  const auto nearest = nearest_names("model.layers.1.mlp.up.weight", names, 2);
  ASSERT_EQ(nearest.size(), 2U);
  EXPECT_EQ(nearest[0], "model.layers.1.mlp.up_proj.weight");
  EXPECT_EQ(nearest[1], "model.layers.0.mlp.up_proj.weight");
  EXPECT_TRUE(nearest_names("x", {}, 3).empty());
}

TEST(TensorTable, NumbersInNamesCountAsNumbers) {
  EXPECT_TRUE(natural_less("table.2", "table.10"));
  EXPECT_FALSE(natural_less("table.10", "table.2"));
  EXPECT_TRUE(natural_less("table.2.a", "table.2.b"));
  EXPECT_TRUE(natural_less("table", "table.0"));
  EXPECT_FALSE(natural_less("table.7", "table.7"));
  EXPECT_NE(natural_less("table.07", "table.7"), natural_less("table.7", "table.07")) << "an order, also of leading zeros";
}

TEST(TensorTable, ElementCountDetectsOverflowBehindAZero) {
  const std::vector<std::uint64_t> scalar;
  EXPECT_EQ(element_count(scalar), 1U);
  const std::vector<std::uint64_t> matrix{3, 5};
  EXPECT_EQ(element_count(matrix), 15U);
  const std::vector<std::uint64_t> empty{3, 0};
  EXPECT_EQ(element_count(empty), 0U);
  const std::vector<std::uint64_t> wraps_to_zero{std::uint64_t{1} << 32, std::uint64_t{1} << 32};
  EXPECT_EQ(element_count(wraps_to_zero), std::nullopt);
  const std::vector<std::uint64_t> hidden{0, std::uint64_t{1} << 40, std::uint64_t{1} << 40};
  EXPECT_EQ(element_count(hidden), std::nullopt);
}

}  // namespace
}  // namespace metrale::weights
