// SPDX-License-Identifier: Apache-2.0
//
// Suite graph: what a replay costs the host, and how far apart the device starts nodes that depend on each other.
#include <array>

#include <fmt/format.h>

#include "bench/suites.h"

namespace metrale::bench {
namespace {

constexpr std::uint32_t kThreads = 128;

/// A chain of launches, each of which waits for the one before and adds to what that one wrote.
Result<Graph> make_chain(GpuBackend& backend, DevicePtr counters, std::uint32_t nodes, std::uint32_t blocks, bool dependent) {
  const KernelHandle kernel = METRALE_TRY(backend.kernel(kBenchModule, "nop_waits"));
  const Stream stream = METRALE_TRY(Stream::create(backend));
  CaptureScope capture = METRALE_TRY(CaptureScope::begin(backend, stream.handle()));
  const std::array<KernelArg, 1> args{KernelArg::buffer(counters)};
  for (std::uint32_t i = 0; i < nodes; ++i) {
    METRALE_TRY(
        backend.launch_typed(kernel, {blocks}, {kThreads}, 0, stream.handle(), args, {.dependent_launch = dependent && i != 0}));
  }
  return capture.end();
}

/// Replays that the driver's queue holds without making the host wait.
std::uint32_t batch_of(std::uint32_t nodes) { return nodes >= 1'000 ? 4 : nodes >= 100 ? 16 : 64; }

Result<> replay_cost(Session& session, DevicePtr counters, std::uint32_t nodes) {
  GpuBackend& backend = session.backend();
  RawDevice* raw = session.raw();
  const Graph graph = METRALE_TRY(make_chain(backend, counters, nodes, 1, false));
  const std::uint32_t raw_graph = raw ? METRALE_TRY(raw->make_chain(nodes, 1, false)) : 0;
  const Stream stream = METRALE_TRY(Stream::create(backend));
  const std::uint32_t batch = batch_of(nodes);
  // A thousand calls where a replay is short; for longer ones as many as fit into a fraction of a second.
  const std::uint32_t batches = std::max(1U, session.scale().graph_calls / batch / (nodes >= 1'000 ? 8 : 1));
  const auto timed = [&](const auto& enqueue, const auto& wait) -> Sample {
    return [&, enqueue, wait]() -> Result<double> {
      double seconds = 0;
      for (std::uint32_t i = 0; i < batches; ++i) {
        seconds += METRALE_TRY(host_seconds(enqueue));
        METRALE_TRY(wait());
      }
      return seconds * 1e9 / (static_cast<double>(batches) * batch);
    };
  };
  const auto launch = [&]() -> Result<> {
    for (std::uint32_t i = 0; i < batch; ++i) METRALE_TRY(graph.launch(stream.handle()));
    return {};
  };
  const Sample ours = timed(launch, [&] { return stream.synchronize(); });
  const Sample theirs =
      raw ? timed([&, raw] { return raw->launch_graph(raw_graph, batch); }, [raw] { return raw->synchronize(); }) : Sample();
  return session.measure({.suite = "graph",
                          .name = fmt::format("replay of {} nodes, host call", nodes),
                          .unit = "ns",
                          .ours = series("launch_graph"),
                          .theirs = series("cuGraphLaunch"),
                          .measure = Measure::ratio,
                          .target = {.minimum = 1.05, .goal = 1.02}},
                         ours, theirs);
}

Result<> node_gap(Session& session, DevicePtr counters, std::uint32_t blocks, bool dependent) {
  GpuBackend& backend = session.backend();
  RawDevice* raw = session.raw();
  const std::uint32_t nodes = session.scale().chain_nodes;
  const Graph graph = METRALE_TRY(make_chain(backend, counters, nodes, blocks, dependent));
  const std::uint32_t raw_graph = raw ? METRALE_TRY(raw->make_chain(nodes, blocks, dependent)) : 0;
  const Stream stream = METRALE_TRY(Stream::create(backend));
  const Sample ours = [&]() -> Result<double> {
    return METRALE_TRY(session.device_seconds(stream.handle(), [&] { return graph.launch(stream.handle()); })) * 1e6 / nodes;
  };
  const Sample theirs = [&]() -> Result<double> { return METRALE_TRY(raw->graph_seconds(raw_graph)) * 1e6 / nodes; };
  // A step is made of dependent launches; the plain chain says what they gain.
  return session.measure({.suite = "graph",
                          .name = fmt::format("a node of {} dependent ones, {} block{}{}", nodes, blocks, blocks == 1 ? "" : "s",
                                              dependent ? ", dependent launch" : ""),
                          .unit = "us",
                          .ours = series("launch_graph"),
                          .theirs = series("cuGraphLaunch"),
                          .measure = Measure::ours,
                          .target = dependent ? Target{.minimum = 1.0, .goal = 0.72} : Target{}},
                         ours, raw ? theirs : Sample());
}

}  // namespace

Result<> run_graph(Session& session, const Options&) {
  GpuBackend& backend = session.backend();
  const std::uint32_t processors = METRALE_TRY(backend.sm_count());
  const std::uint64_t bytes = std::uint64_t{2} * processors * sizeof(float);
  const DeviceBuffer counters = METRALE_TRY(DeviceBuffer::create(backend, bytes));
  METRALE_TRY(backend.memset(counters.ptr(), 0, bytes));
  for (const std::uint32_t nodes : session.scale().graph_nodes) METRALE_TRY(replay_cost(session, counters.ptr(), nodes));
  METRALE_TRY(node_gap(session, counters.ptr(), processors, false));
  if (!backend.capabilities().has(Capability::dependent_launch)) return {};
  METRALE_TRY(node_gap(session, counters.ptr(), 1, true));
  METRALE_TRY(node_gap(session, counters.ptr(), processors, true));
  return node_gap(session, counters.ptr(), 2 * processors, true);
}

}  // namespace metrale::bench
