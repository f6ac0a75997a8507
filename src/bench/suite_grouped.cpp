// SPDX-License-Identifier: Apache-2.0
//
// Suite grouped: the products of a mixture of experts through the CUTLASS bridge, in one launch with sizes that only the device
// knows and rows read by their token's index; beside it a dense product for each expert, whose rows were gathered before the time
// starts and whose sizes the host knows. Weights are larger than any cache.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include <fmt/format.h>

#include "bench/suites.h"
#include "metrale/bridges/cutlass.h"

namespace metrale::bench {
namespace {

using cutlass::Bridge;
using cutlass::Precision;

struct Mixture {
  std::uint32_t experts = 64;
  std::uint32_t tokens = 4'096;
  std::uint32_t top = 8;
  std::uint32_t n = 768;
  std::uint32_t k = 2'048;
};

/// Which tokens each expert has, in order.
struct Routing {
  std::vector<std::int32_t> offsets;
  std::vector<std::int32_t> tokens;
};

/// Each token goes to `top` different experts, drawn with weights that fall as a power of an expert's rank: the first has about
/// five times the mean, the last less than half of it.
Routing route(const Mixture& mixture) {
  std::mt19937 random(17);
  std::vector<double> weight(mixture.experts);
  for (std::uint32_t e = 0; e < mixture.experts; ++e) weight[e] = std::pow(e + 1.0, -0.7);
  std::shuffle(weight.begin(), weight.end(), random);
  std::vector<std::vector<std::int32_t>> of_expert(mixture.experts);
  std::vector<std::pair<double, std::uint32_t>> keys(mixture.experts);
  for (std::uint32_t token = 0; token < mixture.tokens; ++token) {
    // The largest keys of u^(1/w) are a draw without replacement.
    for (std::uint32_t e = 0; e < mixture.experts; ++e) {
      const double u = (random() + 1.0) / 4'294'967'297.0;
      keys[e] = {std::log(u) / weight[e], e};
    }
    std::partial_sort(keys.begin(), keys.begin() + mixture.top, keys.end(), std::greater<>());
    for (std::uint32_t i = 0; i < mixture.top; ++i) of_expert[keys[i].second].push_back(static_cast<std::int32_t>(token));
  }
  Routing routing{.offsets = {0}, .tokens = {}};
  for (const auto& tokens : of_expert) {
    routing.tokens.insert(routing.tokens.end(), tokens.begin(), tokens.end());
    routing.offsets.push_back(static_cast<std::int32_t>(routing.tokens.size()));
  }
  return routing;
}

struct Memory {
  DeviceBuffer act;       ///< [tokens, k]
  DeviceBuffer gathered;  ///< [rows, k]
  DeviceBuffer weight;    ///< [experts, n, k]
  DeviceBuffer out;       ///< [rows, n]
  DeviceBuffer offsets;
  DeviceBuffer index;
  DeviceBuffer act_scales;
  DeviceBuffer weight_scales;
};

/// Any bytes are E4M3 but two; the fill's are none of them in the high byte of a bf16, and seldom in the low one: a NaN costs the
/// time of any number.
Result<Memory> make_memory(Session& session, const Mixture& mixture, const Routing& routing, std::uint64_t element) {
  GpuBackend& backend = session.backend();
  const std::uint64_t rows = routing.tokens.size();
  const std::uint64_t blocks = div_ceil(mixture.k, cutlass::kScaleBlock);
  const auto make = [&](std::uint64_t bytes, std::uint32_t seed) -> Result<DeviceBuffer> {
    DeviceBuffer buffer = METRALE_TRY(DeviceBuffer::create(backend, round_up(bytes, 4)));
    METRALE_TRY(session.fill(buffer.ptr(), buffer.size_bytes(), seed));
    return buffer;
  };
  Memory m;
  m.act = METRALE_TRY(make(mixture.tokens * std::uint64_t{mixture.k} * element, 1));
  m.gathered = METRALE_TRY(make(rows * mixture.k * element, 2));
  m.weight = METRALE_TRY(make(std::uint64_t{mixture.experts} * mixture.n * mixture.k * element, 3));
  m.out = METRALE_TRY(make(rows * mixture.n * 2, 4));
  m.act_scales = METRALE_TRY(make(rows * blocks * sizeof(float), 5));
  m.weight_scales = METRALE_TRY(make(mixture.experts * div_ceil(mixture.n, cutlass::kScaleBlock) * blocks * sizeof(float), 6));
  m.offsets = METRALE_TRY(DeviceBuffer::create(backend, routing.offsets.size() * sizeof(std::int32_t)));
  m.index = METRALE_TRY(DeviceBuffer::create(backend, rows * sizeof(std::int32_t)));
  METRALE_TRY(backend.synchronize(backend.default_stream()));
  METRALE_TRY(backend.copy_h2d(m.offsets.ptr(), std::as_bytes(std::span(routing.offsets))));
  METRALE_TRY(backend.copy_h2d(m.index.ptr(), std::as_bytes(std::span(routing.tokens))));
  return m;
}

Result<> measure_mixture(Session& session, Bridge& bridge, const Mixture& mixture, Precision precision, bool judged) {
  GpuBackend& backend = session.backend();
  const Routing routing = route(mixture);
  const std::uint64_t element = precision == Precision::bf16 ? 2 : 1;
  const auto rows = static_cast<std::uint32_t>(routing.tokens.size());
  const Memory m = METRALE_TRY(make_memory(session, mixture, routing, element));
  const bool scaled = precision == Precision::fp8_block;
  const std::uint64_t blocks = div_ceil(mixture.k, cutlass::kScaleBlock);

  const Stream stream = METRALE_TRY(Stream::create(backend));
  METRALE_TRY(bridge.prepare(stream.handle()));
  constexpr std::uint32_t kCalls = 4;  // in a graph
  CaptureScope capture = METRALE_TRY(CaptureScope::begin(backend, stream.handle()));
  for (std::uint32_t i = 0; i < kCalls; ++i) {
    METRALE_TRY(bridge.grouped({.precision = precision,
                                .experts = mixture.experts,
                                .rows = rows,
                                .tokens = mixture.tokens,
                                .n = mixture.n,
                                .k = mixture.k,
                                .act = m.act.ptr(),
                                .weight = m.weight.ptr(),
                                .out = m.out.ptr(),
                                .act_scales = scaled ? m.act_scales.ptr() : DevicePtr{},
                                .weight_scales = scaled ? m.weight_scales.ptr() : DevicePtr{},
                                .row_index = m.index.ptr(),
                                .offsets = m.offsets.ptr(),
                                .host_offsets = {}},
                               stream.handle()));
  }
  const Graph grouped = METRALE_TRY(capture.end());

  CaptureScope loop_capture = METRALE_TRY(CaptureScope::begin(backend, stream.handle()));
  const std::uint64_t scale_rows = div_ceil(mixture.n, cutlass::kScaleBlock);
  for (std::uint32_t e = 0; e < mixture.experts; ++e) {
    const auto first = static_cast<std::uint64_t>(routing.offsets[e]);
    const auto count = static_cast<std::uint32_t>(routing.offsets[e + 1] - routing.offsets[e]);
    if (count == 0) continue;
    METRALE_TRY(bridge.dense(
        {.precision = precision,
         .m = count,
         .n = mixture.n,
         .k = mixture.k,
         .act = m.gathered.ptr().offset(first * mixture.k * element),
         .weight = m.weight.ptr().offset(std::uint64_t{e} * mixture.n * mixture.k * element),
         .out = m.out.ptr().offset(first * mixture.n * 2),
         .act_scales = scaled ? m.act_scales.ptr().offset(first * blocks * sizeof(float)) : DevicePtr{},
         .weight_scales = scaled ? m.weight_scales.ptr().offset(e * scale_rows * blocks * sizeof(float)) : DevicePtr{}},
        stream.handle()));
  }
  const Graph loop = METRALE_TRY(loop_capture.end());

  const Sample ours = [&]() -> Result<double> {
    return METRALE_TRY(session.device_seconds(stream.handle(), [&] { return grouped.launch(stream.handle()); })) * 1e6 / kCalls;
  };
  const Sample theirs = [&]() -> Result<double> {
    return METRALE_TRY(session.device_seconds(stream.handle(), [&] { return loop.launch(stream.handle()); })) * 1e6;
  };
  const std::string shape = fmt::format("{} experts, {} tokens, top-{}, {}->{} {}", mixture.experts, mixture.tokens, mixture.top,
                                        mixture.k, mixture.n, to_string(precision));
  METRALE_TRY(session.measure({.suite = "grouped",
                               .name = shape + ": grouped, gathered rows / a dense call for each expert",
                               .unit = "us",
                               .ours = series("cutlass grouped"),
                               .theirs = series("cutlass dense, rows gathered before"),
                               .measure = Measure::speedup,
                               .better = Better::larger,
                               .target = judged ? Target{.minimum = 3, .goal = {}} : Target{}},
                              ours, theirs));
  const double seconds = session.report().rows.back().ours->summary().median / 1e6;
  session.report().rows.push_back({.suite = "grouped",
                                   .name = shape + ": TFLOP/s",
                                   .unit = "TFLOP/s",
                                   .measure = Measure::share_of_limit,
                                   .figure = 2.0 * rows * mixture.n * mixture.k / seconds / 1e12,
                                   .better = Better::larger,
                                   .target = judged ? Target{.minimum = 400, .goal = 550} : Target{}});
  return {};
}

/// One product, as the bridge runs it: what the grouped ones are measured against elsewhere.
Result<> measure_dense(Session& session, Bridge& bridge, std::uint32_t m, std::uint32_t n, std::uint32_t k, Precision precision) {
  GpuBackend& backend = session.backend();
  const Mixture one{.experts = 1, .tokens = m, .top = 1, .n = n, .k = k};
  const bool scaled = precision == Precision::fp8_block;
  const Memory memory = METRALE_TRY(make_memory(session, one, route(one), scaled ? 1 : 2));
  const Stream stream = METRALE_TRY(Stream::create(backend));
  const auto call = [&] {
    return bridge.dense({.precision = precision,
                         .m = m,
                         .n = n,
                         .k = k,
                         .act = memory.act.ptr(),
                         .weight = memory.weight.ptr(),
                         .out = memory.out.ptr(),
                         .act_scales = scaled ? memory.act_scales.ptr() : DevicePtr{},
                         .weight_scales = scaled ? memory.weight_scales.ptr() : DevicePtr{}},
                        stream.handle());
  };
  const Sample ours = [&]() -> Result<double> { return METRALE_TRY(session.device_seconds(stream.handle(), call)) * 1e6; };
  METRALE_TRY(session.measure({.suite = "grouped",
                               .name = fmt::format("dense {}x{}x{} {}", m, n, k, to_string(precision)),
                               .unit = "us",
                               .ours = series("cutlass dense"),
                               .measure = Measure::ours},
                              ours, {}));
  return {};
}

}  // namespace

Result<> run_grouped(Session& session, const Options&) {
  auto bridge = Bridge::create(session.backend());
  if (!bridge) {
    session.report().rows.push_back(
        {.suite = "grouped", .name = "grouped products", .unit = "us", .note = bridge.error().message()});
    return {};
  }
  if ((*bridge)->kernels() != "sm_90a") {
    session.report().rows.push_back({.suite = "grouped",
                                     .name = "grouped products",
                                     .unit = "us",
                                     .note = "the device is no Hopper: it has no grouped kernel"});
    return {};
  }
  for (const Precision precision : {Precision::bf16, Precision::fp8_block}) {
    METRALE_TRY(measure_mixture(session, **bridge, {}, precision, precision == Precision::bf16));
    METRALE_TRY(measure_dense(session, **bridge, 4'096, 4'096, 2'048, precision));
  }
  return measure_dense(session, **bridge, 8'192, 8'192, 8'192, Precision::bf16);
}

}  // namespace metrale::bench
