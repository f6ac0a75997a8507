// SPDX-License-Identifier: Apache-2.0
//
// Suite attention: FlashInfer through its bridge. Decode of a batch over shuffled pages against what the device can read, and
// prefill of one long sequence; peers of the latter are a program of their own. And the decoders' recurrent layer for a batch.
// Graphs of launches, device times.
#include <algorithm>
#include <array>
#include <numeric>
#include <random>

#include <fmt/format.h>

#include "bench/suites.h"
#include "metrale/bridges/flashinfer.h"
#include "metrale/kv_cache.h"
#include "models/decoder/ops.h"

namespace metrale::bench {
namespace {

using flashinfer::AttentionPlan;
using flashinfer::AttentionShape;
using flashinfer::Kernel;
using flashinfer::Sequence;

struct Size {
  std::uint32_t num_q_heads;
  std::uint32_t num_kv_heads;
  std::uint32_t batch;
  std::uint32_t context;  // about
  std::uint32_t prefill;
  std::uint32_t launches;
};
constexpr Size kFull{.num_q_heads = 32, .num_kv_heads = 8, .batch = 64, .context = 4'096, .prefill = 4'096, .launches = 8};
constexpr Size kSmall{.num_q_heads = 4, .num_kv_heads = 1, .batch = 3, .context = 64, .prefill = 96, .launches = 2};
constexpr std::uint32_t kHeadDim = 128;
constexpr std::uint32_t kPageSize = 16;
constexpr std::uint32_t kLayers = 2;

/// The kernels that a row is measured with: what the bridge takes is judged, the others stand beside it.
struct Choice {
  Kernel kernel;
  const char* name;
  Target target;
};

/// A graph of `launches` runs on the plan.
Result<Graph> capture(GpuBackend& backend, StreamHandle stream, std::uint32_t launches,
                      const std::function<Result<>(std::uint32_t)>& run) {
  METRALE_TRY(run(0));
  METRALE_TRY(backend.synchronize(stream));
  CaptureScope scope = METRALE_TRY(CaptureScope::begin(backend, stream));
  for (std::uint32_t i = 0; i < launches; ++i) METRALE_TRY(run(i));
  return scope.end();
}

Result<double> measure_graph(Session& session, const Graph& graph, StreamHandle stream, std::uint32_t launches, std::string name,
                             std::string ours, std::string note) {
  const Sample sample = [&]() -> Result<double> {
    return METRALE_TRY(session.device_seconds(stream, [&] { return graph.launch(stream); })) * 1e6 / launches;
  };
  METRALE_TRY(session.measure(
      {.suite = "attention", .name = std::move(name), .unit = "us", .ours = series(std::move(ours)), .note = std::move(note)},
      sample, {}));
  return session.report().rows.back().ours->summary().median / 1e6;
}

void share(Session& session, std::string name, double figure, Target target) {
  session.report().rows.push_back({.suite = "attention",
                                   .name = std::move(name),
                                   .unit = "share",
                                   .measure = Measure::share_of_limit,
                                   .figure = figure,
                                   .better = Better::larger,
                                   .target = target});
}

Result<> measure_decode(Session& session, flashinfer::Bridge& bridge, const Size& size) {
  GpuBackend& backend = session.backend();
  const AttentionShape shape{.num_q_heads = size.num_q_heads, .num_kv_heads = size.num_kv_heads, .head_dim = kHeadDim};
  std::mt19937 random(7);
  std::vector<std::uint32_t> lengths(size.batch);
  std::uint64_t tokens = 0;
  std::uint32_t num_pages = 0;
  for (std::uint32_t& length : lengths) {
    length = size.context * 3 / 4 + static_cast<std::uint32_t>(random() % (size.context / 2 + 1));
    tokens += length;
    num_pages += static_cast<std::uint32_t>(div_ceil(length, kPageSize));
  }
  const KvLayout layout = KvLayout::uniform(kLayers, size.num_kv_heads, kHeadDim, DType::bf16, kPageSize);
  const auto cache = METRALE_TRY(PagedKvCache::create(backend, layout, num_pages));
  std::vector<std::int32_t> pages(num_pages);
  std::iota(pages.begin(), pages.end(), 0);
  std::ranges::shuffle(pages, random);
  std::vector<Sequence> sequences;
  std::size_t at = 0;
  for (const std::uint32_t length : lengths) {
    const std::size_t count = div_ceil(length, kPageSize);
    sequences.push_back({.pages = std::span(pages).subspan(at, count), .kv_tokens = length, .q_tokens = 1});
    at += count;
  }
  std::vector<flashinfer::KvPages> layers;
  const std::uint64_t pool_bytes = num_pages * layout.block_bytes(layout.layers[0].k);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    layers.push_back(METRALE_TRY(flashinfer::kv_pages(*cache, layer)));
    METRALE_TRY(session.fill(layers.back().k, pool_bytes, 2 * layer));
    METRALE_TRY(session.fill(layers.back().v, pool_bytes, 2 * layer + 1));
  }
  const std::uint64_t row_bytes = std::uint64_t{size.num_q_heads} * kHeadDim * 2;
  const DeviceBuffer q = METRALE_TRY(DeviceBuffer::create(backend, size.batch * row_bytes));
  const DeviceBuffer out = METRALE_TRY(DeviceBuffer::create(backend, size.batch * row_bytes));
  METRALE_TRY(session.fill(q.ptr(), q.size_bytes(), 11));
  METRALE_TRY(backend.synchronize(backend.default_stream()));

  const double bytes = static_cast<double>(tokens) * size.num_kv_heads * kHeadDim * 2 * 2;
  const std::string what = fmt::format("decode, batch {}, context about {}, {}/{} heads of {}", size.batch, size.context,
                                       size.num_q_heads, size.num_kv_heads, kHeadDim);
  for (const Choice& choice : {Choice{Kernel::automatic, "automatic", {.minimum = 0.87, .goal = 0.93}},
                               Choice{Kernel::cuda_cores, "cuda cores", {}}, Choice{Kernel::tensor_cores, "tensor cores", {}}}) {
    const Stream stream = METRALE_TRY(Stream::create(backend));
    const auto plan = METRALE_TRY(bridge.make_plan(
        shape, {.page_size = kPageSize, .kernel = choice.kernel, .max_batch = size.batch, .max_rows = 0, .max_pages = num_pages}));
    METRALE_TRY(plan->plan(sequences, stream.handle()));
    const auto run = [&](std::uint32_t i) {
      return plan->run(flashinfer::PagedCall{.q = q.ptr(), .q_stride = 0, .kv = layers[i % kLayers], .out = out.ptr(), .lse = {}},
                       stream.handle());
    };
    const Graph graph = METRALE_TRY(capture(backend, stream.handle(), size.launches, run));
    const double seconds =
        METRALE_TRY(measure_graph(session, graph, stream.handle(), size.launches, fmt::format("{}, {}", what, choice.name),
                                  fmt::format("flashinfer, {}", to_string(plan->kernel())), "a graph, pages of 16 shuffled"));
    share(session, fmt::format("{}, {}: bytes of K and V / time / sweep", what, choice.name),
          bytes / seconds / METRALE_TRY(session.sweep_bytes_per_second()), choice.target);
  }
  return {};
}

Result<> measure_prefill(Session& session, flashinfer::Bridge& bridge, const Size& size) {
  GpuBackend& backend = session.backend();
  const AttentionShape shape{.num_q_heads = size.num_q_heads, .num_kv_heads = size.num_kv_heads, .head_dim = kHeadDim};
  const std::uint64_t q_bytes = std::uint64_t{size.prefill} * size.num_q_heads * kHeadDim * 2;
  const std::uint64_t kv_bytes = std::uint64_t{size.prefill} * size.num_kv_heads * kHeadDim * 2;
  const std::array<std::uint64_t, 4> sizes{q_bytes, kv_bytes, kv_bytes, q_bytes};
  std::array<DeviceBuffer, 4> memory;  // q, k, v, out
  for (std::uint32_t i = 0; i < memory.size(); ++i) {
    memory[i] = METRALE_TRY(DeviceBuffer::create(backend, sizes[i]));
    METRALE_TRY(session.fill(memory[i].ptr(), sizes[i], 20 + i));
  }
  const std::uint32_t num_pages = static_cast<std::uint32_t>(div_ceil(size.prefill, kPageSize));
  const KvLayout layout = KvLayout::uniform(1, size.num_kv_heads, kHeadDim, DType::bf16, kPageSize);
  const auto cache = METRALE_TRY(PagedKvCache::create(backend, layout, num_pages));
  const flashinfer::KvPages kv = METRALE_TRY(flashinfer::kv_pages(*cache, 0));
  METRALE_TRY(session.fill(kv.k, num_pages * layout.block_bytes(layout.layers[0].k), 30));
  METRALE_TRY(session.fill(kv.v, num_pages * layout.block_bytes(layout.layers[0].v), 31));
  METRALE_TRY(backend.synchronize(backend.default_stream()));
  std::vector<std::int32_t> pages(num_pages);
  std::iota(pages.begin(), pages.end(), 0);
  std::ranges::shuffle(pages, std::mt19937(3));

  // Of the half that the mask leaves: two products of a multiplication and an addition each.
  const double flops = 2.0 * size.num_q_heads * kHeadDim * size.prefill * (size.prefill + 1.0);
  const std::string what =
      fmt::format("prefill, {} tokens causal, {}/{} heads of {}", size.prefill, size.num_q_heads, size.num_kv_heads, kHeadDim);
  for (const bool packed : {true, false}) {
    const Stream stream = METRALE_TRY(Stream::create(backend));
    const auto plan = METRALE_TRY(bridge.make_plan(shape, {.page_size = packed ? 0 : kPageSize,
                                                           .kernel = Kernel::automatic,
                                                           .max_batch = 1,
                                                           .max_rows = size.prefill,
                                                           .max_pages = packed ? size.prefill : num_pages}));
    const Sequence sequence{
        .pages = packed ? std::span<const std::int32_t>() : pages, .kv_tokens = size.prefill, .q_tokens = size.prefill};
    METRALE_TRY(plan->plan({&sequence, 1}, stream.handle()));
    const auto run = [&](std::uint32_t) {
      if (!packed) {
        return plan->run(flashinfer::PagedCall{.q = memory[0].ptr(), .q_stride = 0, .kv = kv, .out = memory[3].ptr(), .lse = {}},
                         stream.handle());
      }
      return plan->run(flashinfer::PackedCall{.q = memory[0].ptr(),
                                              .q_stride = 0,
                                              .k = memory[1].ptr(),
                                              .v = memory[2].ptr(),
                                              .kv_stride = 0,
                                              .out = memory[3].ptr(),
                                              .lse = {}},
                       stream.handle());
    };
    const Graph graph = METRALE_TRY(capture(backend, stream.handle(), size.launches, run));
    const double seconds = METRALE_TRY(measure_graph(session, graph, stream.handle(), size.launches,
                                                     fmt::format("{}, {}", what, packed ? "packed" : "pages"),
                                                     fmt::format("flashinfer, {}", to_string(plan->kernel())), {}));
    session.report().rows.back().note = fmt::format("{:.0f} TFLOP/s", flops / seconds / 1e12);
  }
  return {};
}

/// One token of the gated delta rule for many sequences: heads do not touch each other, so those of all sequences are given as the
/// heads of one. What it has to move is the state, once in and once out.
Result<> measure_recurrent(Session& session, bool large) {
  GpuBackend& backend = session.backend();
  const std::uint32_t sequences = large ? 64 : 2;
  constexpr std::uint32_t kKeyHeads = 16;
  constexpr std::uint32_t kValueHeads = 32;
  const std::uint32_t launches = large ? 16 : 2;
  const DeltaParams params{.m = 1,
                           .num_key_heads = sequences * kKeyHeads,
                           .num_value_heads = sequences * kValueHeads,
                           .key_dim = kHeadDim,
                           .value_dim = kHeadDim,
                           .tiled = 0,
                           .ld_qkv = (2 * kKeyHeads + kValueHeads) * sequences * kHeadDim,
                           .ld_z = kValueHeads * sequences * kHeadDim,
                           .ld_ab = kValueHeads * sequences,
                           .norm_eps = 1e-6F};
  const std::uint64_t state_bytes = std::uint64_t{params.num_value_heads} * kHeadDim * kHeadDim * sizeof(float);
  const std::uint64_t z_bytes = params.ld_z * sizeof(float);
  const std::uint64_t head_bytes = params.num_value_heads * sizeof(float);
  enum Part : std::uint8_t { qkv, z, a, b, decay, dt_bias, norm, state, step, out, num_parts };
  const std::array<std::uint64_t, num_parts> sizes{
      params.ld_qkv * sizeof(float), z_bytes,     head_bytes,         head_bytes, head_bytes, head_bytes,
      kHeadDim * sizeof(float),      state_bytes, sizeof(StepHeader), z_bytes};
  std::array<DeviceBuffer, num_parts> memory;
  for (std::uint32_t i = 0; i < num_parts; ++i) {
    memory[i] = METRALE_TRY(DeviceBuffer::create(backend, sizes[i]));
    METRALE_TRY(session.fill(memory[i].ptr(), sizes[i], 40 + i));
  }
  METRALE_TRY(backend.synchronize(backend.default_stream()));
  // What grows would be infinite after some replays.
  const std::vector<float> decays(params.num_value_heads, -0.5F);
  METRALE_TRY(backend.copy_h2d(memory[decay].ptr(), std::as_bytes(std::span(decays))));
  const StepHeader header;
  METRALE_TRY(backend.copy_h2d(memory[step].ptr(), std::as_bytes(std::span(&header, 1))));

  const Stream stream = METRALE_TRY(Stream::create(backend));
  models::Ops ops = METRALE_TRY(models::Ops::create(backend, stream.handle(), {}));
  const models::Ops::Delta tensors{memory[qkv].ptr(),   memory[z].ptr(),       memory[a].ptr(),    memory[b].ptr(),
                                   memory[decay].ptr(), memory[dt_bias].ptr(), memory[norm].ptr(), memory[state].ptr(),
                                   memory[step].ptr(),  memory[out].ptr()};
  const Graph graph =
      METRALE_TRY(capture(backend, stream.handle(), launches, [&](std::uint32_t) { return ops.delta(tensors, params); }));
  const std::string what =
      fmt::format("gated delta rule, one token of {} sequences, {} states of {}x{}", sequences, kValueHeads, kHeadDim, kHeadDim);
  const double seconds = METRALE_TRY(
      measure_graph(session, graph, stream.handle(), launches, what, "decoder.delta", "the heads of all sequences in one launch"));
  const std::uint64_t copy_bytes = session.scale().device_copy_bytes;
  const DeviceBuffer from = METRALE_TRY(DeviceBuffer::create(backend, copy_bytes));
  const DeviceBuffer to = METRALE_TRY(DeviceBuffer::create(backend, copy_bytes));
  METRALE_TRY(session.fill(from.ptr(), copy_bytes, 50));
  METRALE_TRY(backend.synchronize(backend.default_stream()));
  std::vector<double> copies;
  for (int i = 0; i < 4; ++i) {
    copies.push_back(METRALE_TRY(session.device_seconds(
        stream.handle(), [&] { return backend.copy_d2d_async(to.ptr(), from.ptr(), copy_bytes, stream.handle()); })));
  }
  const double copy_rate = 2.0 * static_cast<double>(copy_bytes) / *std::ranges::min_element(copies);
  share(session, what + ": twice the states / time / copy", 2.0 * static_cast<double>(state_bytes) / seconds / copy_rate,
        {.minimum = 0.75, .goal = 0.90});
  return {};
}

}  // namespace

Result<> run_attention(Session& session, const Options&) {
  METRALE_TRY(measure_recurrent(session, session.scale().large_models));
  Result<std::unique_ptr<flashinfer::Bridge>> bridge = flashinfer::Bridge::create(session.backend());
  if (!bridge) {
    // Where there is no such library there is nothing to measure; the report says why.
    if (bridge.error().code() != Errc::unsupported) return std::move(bridge).error();
    session.report().rows.push_back({.suite = "attention", .name = "FlashInfer", .note = bridge.error().message()});
    return {};
  }
  const Size& size = session.scale().large_models ? kFull : kSmall;
  METRALE_TRY(session.sweep_bytes_per_second());
  METRALE_TRY(measure_decode(session, **bridge, size));
  return measure_prefill(session, **bridge, size);
}

}  // namespace metrale::bench
