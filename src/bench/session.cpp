// SPDX-License-Identifier: Apache-2.0
#include "bench/session.h"

#include <algorithm>

#include "metrale/launch.h"

namespace metrale::bench {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

constexpr std::uint32_t kMinimumRounds = 3;
constexpr std::uint32_t kSweeps = 11;
constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kBlocksPerProcessor = 8;
constexpr std::uint64_t kWordBytes = 16;  // what one thread reads or writes at once

}  // namespace

Scale Scale::small() {
  Scale s;
  s.rounds = 3;
  s.warm_up_seconds = 0.02;
  s.row_seconds = 1;
  s.most_rounds = 0;
  s.launch_batch = 64;
  s.launch_batches = 1;
  s.alloc_calls = 64;
  s.pool_calls = 256;
  s.pinned_bytes = std::uint64_t{1} << 20;
  s.gather_blocks = 6;
  s.gather_block_bytes = 4'352;
  s.host_copy_bytes = std::uint64_t{1} << 20;
  s.device_copy_bytes = std::uint64_t{1} << 20;
  s.sweep_bytes = std::uint64_t{4} << 20;
  s.graph_nodes = {4};
  s.graph_calls = 16;
  s.chain_nodes = 16;
  s.gemv_bytes = std::uint64_t{4} << 20;
  s.gemv_launches = 4;
  s.context_tokens = 16;
  s.decode_steps = 4;
  s.large_models = false;
  s.judged = false;
  return s;
}

Result<double> host_seconds(const std::function<Result<>()>& body) {
  const Clock::time_point start = Clock::now();
  METRALE_TRY(body());
  return seconds_since(start);
}

Result<> Session::warm_up() {
  const DeviceBuffer buffer = METRALE_TRY(DeviceBuffer::create(backend_, std::min<std::uint64_t>(scale_.sweep_bytes, 1U << 30)));
  const Clock::time_point start = Clock::now();
  std::uint32_t seed = 1;
  do {
    METRALE_TRY(fill(buffer.ptr(), buffer.size_bytes(), seed++));
    METRALE_TRY(backend_.synchronize(backend_.default_stream()));
  } while (seconds_since(start) < scale_.warm_up_seconds);
  return {};
}

Result<> Session::measure(Row row, const Sample& ours, const Sample& theirs) {
  const Clock::time_point start = Clock::now();
  METRALE_TRY(ours());
  if (theirs) METRALE_TRY(theirs());
  for (std::uint32_t round = 0; round < std::max(scale_.rounds, scale_.most_rounds); ++round) {
    const double seconds = seconds_since(start);
    if (round >= kMinimumRounds && seconds > scale_.row_seconds) break;
    if (round >= scale_.rounds && seconds > scale_.short_row_seconds) break;
    row.ours->samples.push_back(METRALE_TRY(ours()));
    if (theirs) row.theirs->samples.push_back(METRALE_TRY(theirs()));
  }
  if (!theirs) row.theirs.reset();
  report_.rows.push_back(std::move(row));
  return {};
}

Result<> Session::fill(DevicePtr ptr, std::uint64_t bytes, std::uint32_t seed) {
  const KernelHandle kernel = METRALE_TRY(backend_.kernel(kBenchModule, "fill"));
  const std::uint32_t blocks = METRALE_TRY(backend_.sm_count()) * kBlocksPerProcessor;
  METRALE_TRY(Launch(backend_, kernel)
                  .grid({blocks})
                  .block({kThreads})
                  .arg_ptr(ptr)
                  .arg_u64(bytes / kWordBytes)
                  .arg_u32(seed)
                  .launch(backend_.default_stream()));
  return {};
}

Result<double> Session::sweep_bytes_per_second() {
  if (sweep_) return *sweep_;
  const KernelHandle kernel = METRALE_TRY(backend_.kernel(kBenchModule, "touch"));
  const std::uint32_t processors = METRALE_TRY(backend_.sm_count());
  const DeviceBuffer buffer = METRALE_TRY(DeviceBuffer::create(backend_, scale_.sweep_bytes));
  const DeviceBuffer out = METRALE_TRY(DeviceBuffer::create(backend_, sizeof(std::uint32_t)));
  METRALE_TRY(fill(buffer.ptr(), buffer.size_bytes(), 7));
  const StreamHandle stream = backend_.default_stream();
  METRALE_TRY(backend_.memset_async(out.ptr(), 0, out.size_bytes(), stream));
  // The best of a few grids is the device's figure: what a kernel reaches must not look better than it is.
  double best = 0;
  for (const std::uint32_t blocks : {4U, 8U, 16U}) {
    std::vector<double> samples;
    for (std::uint32_t i = 0; i < kSweeps; ++i) {
      const double seconds = METRALE_TRY(device_seconds(stream, [&] {
        return Launch(backend_, kernel)
            .grid({processors * blocks})
            .block({kThreads})
            .arg_ptr(buffer.ptr())
            .arg_u64(buffer.size_bytes() / kWordBytes)
            .arg_ptr(out.ptr())
            .launch(stream);
      }));
      if (i != 0) samples.push_back(static_cast<double>(buffer.size_bytes()) / seconds);
    }
    best = std::max(best, summarise(samples).median);
  }
  sweep_ = best;
  Row row{.suite = "sweep", .name = "", .unit = "GB/s"};
  row.name = "read-only sweep of " + std::to_string(scale_.sweep_bytes >> 20) + " MiB";
  row.ours = Series{.name = "bench.touch", .samples = {best / 1e9}};
  row.better = Better::larger;
  report_.rows.push_back(std::move(row));
  return best;
}

Result<double> Session::device_seconds(StreamHandle stream, const std::function<Result<>()>& body) {
  if (!start_) start_ = METRALE_TRY(Event::create_timed(backend_));
  if (!end_) end_ = METRALE_TRY(Event::create_timed(backend_));
  METRALE_TRY(start_.record(stream));
  METRALE_TRY(body());
  METRALE_TRY(end_.record(stream));
  METRALE_TRY(end_.synchronize());
  return static_cast<double>(METRALE_TRY(end_.elapsed_ns_since(start_))) / 1e9;
}

}  // namespace metrale::bench
