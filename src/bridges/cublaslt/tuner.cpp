// SPDX-License-Identifier: Apache-2.0
#include "bridges/cublaslt/tuner.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>

#include "bridges/cublaslt/shape.h"
#include "metrale/graph.h"
#include "metrale/launch.h"
#include "metrale/op_cache.h"

namespace metrale::cublaslt {
namespace {

// Together larger than the caches of the devices that there are, twice over where the shape is small.
constexpr std::uint64_t kRotatedBytes = std::uint64_t{192} << 20;
constexpr std::size_t kMostSets = 16;
constexpr std::uint32_t kRounds = 5;  // after one that is dropped
constexpr double kGraphSeconds = 400e-6;
constexpr std::size_t kMostLaunches = 48;
// For how many launches fill a graph, roughly: rates of a device that nothing depends on.
constexpr double kFlopsPerSecond = 6e14;
constexpr double kBytesPerSecond = 3e12;
constexpr double kLaunchSeconds = 3e-6;
constexpr double kHopeless = 1.5;  // times the fastest, after one round
constexpr std::uint32_t kPrefixRows[] = {1, 8, 17, 100};
constexpr std::uint32_t kThreads = 256;
constexpr std::uint64_t kWordBytes = 16;
constexpr std::uint8_t kScaleByte = 0x3f;  // four of them: 0.747

}  // namespace

Result<> Tuner::fill(DevicePtr ptr, std::uint64_t bytes, bool fp8) {
  if (!ptr) return {};
  // bf16, and pairs of it as float32: magnitudes of 0.0078 to 2. E4M3: any below 2, no NaN.
  const std::uint32_t keep = fp8 ? 0xbfbf'bfbfU : 0x83ff'83ffU;
  const std::uint32_t set = fp8 ? 0 : 0x3c00'3c00U;
  const auto kernel = METRALE_TRY(backend_->op_cache().kernel(kBridgeModule, "fill_random", site_));
  const std::uint64_t words = bytes / kWordBytes;
  const auto blocks = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(div_ceil(words, kThreads), 1, 4096));
  return Launch(*backend_, kernel.handle)
      .grid({blocks})
      .block({kThreads})
      .arg_ptr(ptr)
      .arg_u64(words)
      .arg_u32(++seed_)
      .arg_u32(keep)
      .arg_u32(set)
      .launch(stream_.handle(), site_);
}

Result<Tuner> Tuner::create(GpuBackend& backend, const Api& api, cublasLtHandle_t handle, const Call& call, std::uint32_t rows,
                            std::uint64_t workspace_bytes, std::source_location site) {
  Tuner tuner(backend, api, handle, site);
  tuner.rows_ = rows;
  Call shape = call;
  shape.m = rows;
  shape.rows_padded = true;
  shape.scales_transposed = true;
  const Extents e = extents_of(shape);
  const auto room = [](std::uint64_t bytes) { return round_up(bytes, kDeviceAlignment); };
  const std::uint64_t set_bytes =
      room(e.act) + room(e.weight) + room(e.out) + room(e.bias) + room(e.residual) + room(e.act_scales) + room(e.weight_scales);
  const auto num_sets = static_cast<std::size_t>(std::clamp<std::uint64_t>(div_ceil(kRotatedBytes, set_bytes), 1, kMostSets));
  tuner.memory_ = METRALE_TRY(DeviceBuffer::create(backend, set_bytes * num_sets, site));
  tuner.workspace_ = METRALE_TRY(DeviceBuffer::create(backend, std::max<std::uint64_t>(workspace_bytes, kDeviceAlignment), site));
  tuner.stream_ = METRALE_TRY(Stream::create(backend, 0, site));
  tuner.start_ = METRALE_TRY(Event::create_timed(backend, site));
  tuner.end_ = METRALE_TRY(Event::create_timed(backend, site));
  DevicePtr next = tuner.memory_.ptr();
  const bool fp8 = call.precision != Precision::bf16;
  for (std::size_t i = 0; i < num_sets; ++i) {
    Call set = shape;
    const auto place = [&](DevicePtr& ptr, std::uint64_t bytes, bool as_fp8) -> Result<> {
      ptr = bytes != 0 ? next : DevicePtr{};
      next = next.offset(room(bytes));
      return tuner.fill(ptr, room(bytes), as_fp8);
    };
    METRALE_TRY(place(set.act, e.act, fp8));
    METRALE_TRY(place(set.weight, e.weight, fp8));
    METRALE_TRY(place(set.out, e.out, false));
    METRALE_TRY(place(set.bias, e.bias, false));
    METRALE_TRY(place(set.residual, e.residual, false));
    METRALE_TRY(place(set.act_scales, e.act_scales, false));
    METRALE_TRY(place(set.weight_scales, e.weight_scales, false));
    tuner.sets_.push_back(set);
  }
  METRALE_TRY(tuner.stream_.synchronize(site));
  return tuner;
}

Result<> Tuner::enqueue(const Plan& plan, std::uint32_t rows, std::size_t set) {
  const Call& call = sets_[set % sets_.size()];
  const NativeUse uses[] = {{"operands of a measurement", memory_.ptr(), memory_.size_bytes()},
                            {"workspace of a measurement", workspace_.ptr(), workspace_.size_bytes()}};
  return backend_->enqueue_native(
      "cublaslt.measure", stream_.handle(), uses,
      [&](std::uint64_t native) {
        return api_->check(launch(*api_, handle_, plan, call, rows, call.act_scales, workspace_.ptr(), native), "cublasLtMatmul",
                           site_);
      },
      site_);
}

Result<std::vector<double>> Tuner::measure(std::span<const Plan> plans, std::uint32_t rows) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  Call call = sets_.front();
  call.m = rows;
  const Extents e = extents_of(call);
  const double flops = 2.0 * call.m * call.n * call.k * call.batch;
  const double guess =
      kLaunchSeconds + std::max(flops / kFlopsPerSecond, static_cast<double>(e.act + e.weight + e.out) / kBytesPerSecond);
  const auto launches = std::clamp<std::size_t>(static_cast<std::size_t>(kGraphSeconds / guess), 2, kMostLaunches);

  std::vector<double> best(plans.size(), kNever);
  std::vector<Graph> graphs(plans.size());
  for (std::size_t i = 0; i < plans.size(); ++i) {
    // Outside the capture first: the library may load code. What it refuses here is no candidate; a fault is the backend's to tell.
    if (Result<> ran = enqueue(plans[i], rows, i); !ran) {
      METRALE_TRY(backend_->health(site_));
      continue;
    }
    METRALE_TRY(stream_.synchronize(site_));
    CaptureScope capture = METRALE_TRY(CaptureScope::begin(*backend_, stream_.handle(), site_));
    for (std::size_t j = 0; j < launches; ++j) METRALE_TRY(enqueue(plans[i], rows, j));
    graphs[i] = METRALE_TRY(capture.end(site_));
  }
  std::vector<std::vector<double>> samples(plans.size());
  for (std::uint32_t round = 0; round <= kRounds; ++round) {
    double fastest = kNever;
    for (std::size_t i = 0; i < plans.size(); ++i) {
      if (!graphs[i]) continue;
      METRALE_TRY(start_.record(stream_.handle(), site_));
      METRALE_TRY(graphs[i].launch(stream_.handle(), site_));
      METRALE_TRY(end_.record(stream_.handle(), site_));
      METRALE_TRY(end_.synchronize(site_));
      samples[i].push_back(static_cast<double>(METRALE_TRY(end_.elapsed_ns_since(start_, site_))) * 1e-9 /
                           static_cast<double>(launches));
      fastest = std::min(fastest, samples[i].back());
    }
    for (std::size_t i = 0; i < plans.size(); ++i) {
      if (!graphs[i]) continue;
      if (round == 0) {
        if (samples[i].back() > kHopeless * fastest) {
          best[i] = samples[i].back();
          METRALE_TRY(graphs[i].release(site_));
        }
        samples[i].clear();
      }
    }
  }
  for (std::size_t i = 0; i < plans.size(); ++i) {
    if (samples[i].empty()) continue;
    const auto middle = samples[i].begin() + static_cast<std::ptrdiff_t>(samples[i].size() / 2);
    std::nth_element(samples[i].begin(), middle, samples[i].end());
    best[i] = *middle;
  }
  return best;
}

Result<std::vector<std::byte>> Tuner::output_of(const Plan& plan, std::uint32_t rows, std::uint32_t kept_rows) {
  const Call& call = sets_.front();
  METRALE_TRY(enqueue(plan, rows, 0));
  std::vector<std::byte> bytes((kept_rows - std::uint64_t{1}) * strides_of(call).out * out_bytes(call) + call.n * out_bytes(call));
  METRALE_TRY(backend_->copy_d2h_on_stream(bytes, call.out, stream_.handle(), site_));
  return bytes;
}

Result<bool> Tuner::is_row_invariant(const Plan& plan) {
  std::vector<std::uint32_t> prefixes;
  const std::uint32_t step = sets_.front().precision == Precision::fp8_block ? kBlockRows : 1;
  for (const std::uint32_t rows : kPrefixRows) {
    const auto whole = static_cast<std::uint32_t>(round_up(rows, step));
    if (whole < rows_) prefixes.push_back(whole);
  }
  if (prefixes.empty()) return true;
  // The library takes the scales of blocks with a stride of `rows`, so the same memory holds others for each number of them: one
  // value for all, then.
  if (step != 1) {
    METRALE_TRY(backend_->memset_async(sets_.front().act_scales, kScaleByte, extents_of(sets_.front()).act_scales, stream_.handle(),
                                       site_));
  }
  const std::vector<std::byte> all = METRALE_TRY(output_of(plan, rows_, prefixes.back()));
  const Call& call = sets_.front();
  const std::uint64_t row_bytes = call.n * out_bytes(call);
  const std::uint64_t stride_bytes = strides_of(call).out * out_bytes(call);
  for (const std::uint32_t rows : prefixes) {
    METRALE_TRY(backend_->memset_async(call.out, 0xFF, extents_of(call).out, stream_.handle(), site_));
    const std::vector<std::byte> some = METRALE_TRY(output_of(plan, rows, rows));
    for (std::uint64_t row = 0; row < rows; ++row) {
      const auto at = static_cast<std::ptrdiff_t>(row * stride_bytes);
      if (!std::equal(some.begin() + at, some.begin() + at + static_cast<std::ptrdiff_t>(row_bytes), all.begin() + at))
        return false;
    }
  }
  return true;
}

}  // namespace metrale::cublaslt
