// SPDX-License-Identifier: Apache-2.0
//
// Suite gemv: one row times a bf16 matrix, as the decoders launch it, in a graph of many over matrices that together are larger
// than any cache; beside it the vendor's library in a graph of its own over the same matrices.
#include <algorithm>

#include <fmt/format.h>

#include "bench/suites.h"
#include "models/decoder/ops.h"

namespace metrale::bench {
namespace {

using models::Matrix;
using models::Ops;
using models::Product;

struct Shape {
  std::uint32_t n;
  std::uint32_t k;
  Target target;
};

constexpr std::uint32_t kMostMatrices = 64;

Result<> measure_shape(Session& session, const Shape& shape) {
  GpuBackend& backend = session.backend();
  RawDevice* raw = session.raw();
  const Scale& scale = session.scale();
  const std::uint64_t matrix_bytes = std::uint64_t{shape.n} * shape.k * 2;
  const auto count = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(scale.gemv_bytes / matrix_bytes, 1, kMostMatrices));
  const std::uint32_t launches = round_up(std::min(scale.gemv_launches, std::max(count, 8U)), count);

  // The peer reads the rows as they are, so its matrices are not the packed ones.
  const DeviceBuffer ours_memory = METRALE_TRY(DeviceBuffer::create(backend, matrix_bytes * count));
  DeviceBuffer peer_memory;
  METRALE_TRY(session.fill(ours_memory.ptr(), ours_memory.size_bytes(), shape.n));
  const DeviceBuffer x = METRALE_TRY(DeviceBuffer::create(backend, shape.k * sizeof(float)));
  const DeviceBuffer y = METRALE_TRY(DeviceBuffer::create(backend, shape.n * sizeof(float)));
  // Pairs of such bf16 values are finite floats of magnitude 0.0078 to 2 as well.
  METRALE_TRY(session.fill(x.ptr(), x.size_bytes(), 9));
  METRALE_TRY(backend.synchronize(backend.default_stream()));

  const Stream stream = METRALE_TRY(Stream::create(backend));
  Ops ops = METRALE_TRY(Ops::create(backend, stream.handle(), {}));
  std::vector<Matrix> matrices;
  for (std::uint32_t i = 0; i < count; ++i) {
    matrices.push_back({.ptr = ours_memory.ptr().offset(i * matrix_bytes), .n = shape.n, .k = shape.k, .dtype = DType::bf16});
    METRALE_TRY(ops.repack(matrices.back()));
  }
  METRALE_TRY(stream.synchronize());
  CaptureScope capture = METRALE_TRY(CaptureScope::begin(backend, stream.handle()));
  for (std::uint32_t i = 0; i < launches; ++i) {
    const Product product{.weight = &matrices[i % count], .bias = {}, .residual = {}, .y = y.ptr()};
    METRALE_TRY(ops.linear({.x = x.ptr(), .m = 1, .k = shape.k, .norm = {}, .norm_eps = 0}, {&product, 1}));
  }
  const Graph graph = METRALE_TRY(capture.end());

  std::optional<std::uint32_t> peer;
  std::string why_not;
  if (raw != nullptr) {
    peer_memory = METRALE_TRY(DeviceBuffer::create(backend, matrix_bytes * count));
    METRALE_TRY(session.fill(peer_memory.ptr(), peer_memory.size_bytes(), shape.n));
    METRALE_TRY(backend.synchronize(backend.default_stream()));
    std::vector<DevicePtr> weights;
    for (std::uint32_t i = 0; i < count; ++i) weights.push_back(peer_memory.ptr().offset(i * matrix_bytes));
    peer = METRALE_TRY(raw->make_peer({.n = shape.n, .k = shape.k, .weights = weights, .count = launches}, why_not));
  }
  const Sample ours = [&]() -> Result<double> {
    return METRALE_TRY(session.device_seconds(stream.handle(), [&] { return graph.launch(stream.handle()); })) * 1e6 / launches;
  };
  const Sample theirs = [&]() -> Result<double> { return METRALE_TRY(raw->graph_seconds(*peer)) * 1e6 / launches; };
  METRALE_TRY(session.measure({.suite = "gemv",
                               .name = fmt::format("1 row x {}x{} bf16, {} matrices in turn", shape.n, shape.k, count),
                               .unit = "us",
                               .ours = series("matmul.linear"),
                               .theirs = series("cuBLASLt"),
                               .measure = Measure::ours,
                               .target = shape.target,
                               .note = why_not},
                              ours, peer ? theirs : Sample()));

  const double seconds = session.report().rows.back().ours->summary().median / 1e6;
  session.report().rows.push_back(
      {.suite = "gemv",
       .name = fmt::format("1 row x {}x{} bf16, bytes of weights / time / sweep", shape.n, shape.k),
       .unit = "share",
       .measure = Measure::share_of_limit,
       .figure = static_cast<double>(matrix_bytes) / seconds / METRALE_TRY(session.sweep_bytes_per_second()),
       .better = Better::larger});
  return {};
}

}  // namespace

Result<> run_gemv(Session& session, const Options&) {
  METRALE_TRY(session.sweep_bytes_per_second());
  std::vector<Shape> shapes;
  if (session.scale().large_models) {
    shapes = {{4'096, 4'096, {.minimum = 10, .goal = 9}}, {14'336, 4'096, {}}, {4'096, 14'336, {}}, {128'256, 4'096, {}}};
  } else {
    shapes = {{512, 512, {}}};
  }
  for (const Shape& shape : shapes) METRALE_TRY(measure_shape(session, shape));
  return {};
}

}  // namespace metrale::bench
