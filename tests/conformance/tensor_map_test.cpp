// SPDX-License-Identifier: Apache-2.0
//
// tensor_map: what is refused, and that a map reaches a kernel whole.
#include <algorithm>

#include "conformance/case.h"
#include "metrale/tensor_map.h"

namespace metrale::conformance {
namespace {

class TensorMaps : public CaseNeeding<tensor_maps, memory> {
 protected:
  static constexpr std::uint64_t kRows = 64, kCols = 128;

  TensorTile tile() {
    if (!ptr_) ptr_ = block(kRows * kCols * 2);
    return {.address = ptr_,
            .dtype = DType::bf16,
            .rows = kRows,
            .cols = kCols,
            .row_stride_bytes = kCols * 2,
            .box_rows = 8,
            .box_cols = 64};
  }
  /// Whether the tile is refused with `code` once `change` was made.
  template <class Change>
  ::testing::AssertionResult refuses(Errc code, Change change) {
    TensorTile changed = tile();
    change(changed);
    return refused(gpu().tensor_map(changed), code, {"tensor_map"});
  }

 private:
  DevicePtr ptr_;
};

TEST_F(TensorMaps, AreMadeOfEveryDenseTypeOfAKernel) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32, DType::f8_e4m3, DType::i8, DType::i32}) {
    TensorTile t = tile();
    t.dtype = dtype;
    t.cols = 32;
    t.box_cols = 16;
    const TensorMap map = must(gpu().tensor_map(t));
    EXPECT_FALSE(std::all_of(map.words.begin(), map.words.end(), [](std::uint64_t word) { return word == 0; })) << to_string(dtype);
  }
}

TEST_F(TensorMaps, DifferWhereTheTilesDo) {
  const TensorMap map = must(gpu().tensor_map(tile()));
  EXPECT_EQ(map.words, must(gpu().tensor_map(tile())).words);
  TensorTile other = tile();
  other.box_rows = 16;
  EXPECT_NE(map.words, must(gpu().tensor_map(other)).words);
  other = tile();
  other.address = other.address.offset(kTensorMapAlignment);
  other.rows = kRows - 1;
  EXPECT_NE(map.words, must(gpu().tensor_map(other)).words);
}

TEST_F(TensorMaps, AreMadeDuringACaptureToo) {
  need({graphs, streams});
  const StreamHandle s = stream();
  const TensorTile made = tile();
  must(gpu().begin_capture(s));
  EXPECT_TRUE(ok(gpu().tensor_map(made)));
  must(gpu().destroy_graph(must(gpu().end_capture(s))));
}

TEST_F(TensorMaps, RefuseWhatTheDeviceCannotRead) {
  EXPECT_TRUE(refuses(Errc::invalid_argument, [](TensorTile& t) { t.dtype = DType::q4_0; }));
  EXPECT_TRUE(refuses(Errc::invalid_argument, [](TensorTile& t) { t.rows = 0; }));
  EXPECT_TRUE(refuses(Errc::invalid_argument, [](TensorTile& t) { t.cols = 0; }));
  EXPECT_TRUE(refuses(Errc::invalid_argument, [](TensorTile& t) { t.address = t.address.offset(8), t.rows = 1; }));
  EXPECT_TRUE(refuses(Errc::invalid_argument, [](TensorTile& t) { t.row_stride_bytes += 8, t.rows = 1; }));
  EXPECT_TRUE(refuses(Errc::invalid_argument, [](TensorTile& t) { t.row_stride_bytes -= 16; }));
  EXPECT_TRUE(refuses(Errc::invalid_argument, [](TensorTile& t) { t.box_rows = 0; }));
  EXPECT_TRUE(refuses(Errc::invalid_argument, [](TensorTile& t) { t.box_cols = 0; }));
  EXPECT_TRUE(refuses(Errc::invalid_argument, [](TensorTile& t) { t.box_rows = kMaxTensorBox + 1; }));
  EXPECT_TRUE(refuses(Errc::invalid_argument, [](TensorTile& t) { t.box_cols = 12; }));
}

TEST_F(TensorMaps, RefuseAMatrixThatLeavesItsBlock) {
  EXPECT_TRUE(refuses(Errc::out_of_range, [](TensorTile& t) { t.rows += 1; }));
  EXPECT_TRUE(refuses(Errc::out_of_range, [](TensorTile& t) { t.address = t.address.offset(16); }));
  EXPECT_TRUE(refuses(Errc::out_of_range, [](TensorTile& t) { t.rows = UINT64_MAX; }));
  EXPECT_TRUE(refuses(Errc::out_of_range, [](TensorTile& t) { t.address = {0x1000}; }));
}

TEST_F(TensorMaps, ReachAKernelWhole) {
  need({kernels, computes, copies, streams});
  const TensorMap map = must(gpu().tensor_map(tile()));
  const DevicePtr out = block(17 * sizeof(std::uint64_t));
  const StreamHandle s = stream();
  launch(kernel(kEcho), s, {KernelArg::buffer(out), map.arg(), KernelArg::value(7u)});
  settle(s);
  const auto seen = read<std::uint64_t>(out, 17);
  EXPECT_TRUE(std::equal(map.words.begin(), map.words.end(), seen.begin()));
  EXPECT_EQ(seen[16], 7u);
}

}  // namespace
}  // namespace metrale::conformance
