// SPDX-License-Identifier: Apache-2.0
//
// Session: one run of the benchmarks on one backend. It warms the device, takes samples of both sides in turn, keeps what several
// suites need, and collects the report. Holds its backend and the raw side by reference. One thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/raw_device.h"
#include "bench/report.h"
#include "metrale/backend.h"
#include "metrale/device_buffer.h"
#include "metrale/event.h"
#include "metrale/graph.h"
#include "metrale/stream.h"

namespace metrale::bench {

inline constexpr std::string_view kBenchModule = "bench";

/// How much is measured. The default is for a GPU; `small` ends within seconds on a host and in tests, and its figures say nothing.
struct Scale {
  std::uint32_t rounds = 15;
  double warm_up_seconds = 1.2;  ///< Before each suite and model.
  double row_seconds = 12;       ///< A row that takes longer ends early, but not before three rounds.
  double short_row_seconds = 1;  ///< A row that is done sooner goes on, up to `most_rounds`: short samples scatter more.
  std::uint32_t most_rounds = 101;
  std::uint32_t launch_batch = 512;  ///< Launches between two waits: the driver's queue holds some thousand.
  std::uint32_t launch_batches = 4;
  std::uint32_t alloc_calls = 1'024;
  std::uint32_t pool_calls = 8'192;
  std::uint64_t pinned_bytes = std::uint64_t{64} << 20;
  std::uint32_t gather_blocks = 60;
  std::uint64_t gather_block_bytes = 1'114'112;
  std::uint64_t host_copy_bytes = std::uint64_t{1} << 30;
  std::uint64_t device_copy_bytes = std::uint64_t{4} << 30;
  std::uint64_t sweep_bytes = std::uint64_t{8} << 30;
  std::vector<std::uint32_t> graph_nodes{16, 256, 2'048};
  std::uint32_t graph_calls = 1'024;
  std::uint32_t chain_nodes = 1'000;
  std::uint64_t gemv_bytes = std::uint64_t{1} << 30;  ///< Of all the matrices that a product goes through in turn.
  std::uint32_t gemv_launches = 64;
  std::uint32_t context_tokens = 512;
  std::uint32_t decode_steps = 96;
  bool large_models = true;
  bool judged = true;  ///< Figures are held against what they have to reach.

  static Scale small();
};

/// Takes one sample, in the row's unit.
using Sample = std::function<Result<double>()>;

class Session {
 public:
  /// `raw` may be null: our side is measured by itself then, and nothing is judged.
  Session(GpuBackend& backend, RawDevice* raw, Scale scale) : backend_(backend), raw_(raw), scale_(std::move(scale)) {}

  GpuBackend& backend() noexcept { return backend_; }
  RawDevice* raw() noexcept { return raw_; }
  const Scale& scale() const noexcept { return scale_; }
  Report& report() noexcept { return report_; }

  /// Keeps the device busy for `Scale::warm_up_seconds`: its clocks rise slowly.
  Result<> warm_up();

  /// Takes samples of both sides in turn, A B A B, after one of each that is dropped, and adds `row` with them. An empty `theirs`
  /// leaves that side out. `row.ours->name` and `row.theirs->name` are set by the caller.
  Result<> measure(Row row, const Sample& ours, const Sample& theirs);

  /// Fills device memory with random bf16 values of magnitude about 0.01 to 1.
  Result<> fill(DevicePtr ptr, std::uint64_t bytes, std::uint32_t seed);
  /// Bytes a second of a kernel that reads `Scale::sweep_bytes` and does nothing else, the median of several; measured once.
  Result<double> sweep_bytes_per_second();

  /// Device time in seconds of `body`'s work on `stream`, by events.
  Result<double> device_seconds(StreamHandle stream, const std::function<Result<>()>& body);

 private:
  GpuBackend& backend_;
  RawDevice* raw_;
  Scale scale_;
  Report report_;
  std::optional<double> sweep_;
  Event start_;
  Event end_;
};

/// Seconds that `body` takes by the host's clock.
Result<double> host_seconds(const std::function<Result<>()>& body);

inline Series series(std::string name) { return {.name = std::move(name), .samples = {}}; }

}  // namespace metrale::bench
