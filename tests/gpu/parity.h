// SPDX-License-Identifier: Apache-2.0
//
// Kernels of two backends on the same inputs. A Side is one backend with one precision: it hands out memory of one block, poisoned
// and with a guard behind each part, and launches through Ops, which asks that backend's plans. Results are compared in relative L2
// and in norm, and the worst of each kernel is printed at the end. One thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "gpu/gpu_fixture.h"
#include "metrale/dequantise.h"
#include "metrale/stream.h"
#include "models/decoder/ops.h"
#include "unit/models/model_fixture.h"

namespace metrale::test {

class Side {
 public:
  static constexpr std::uint64_t kBytes = std::uint64_t{384} << 20;
  static constexpr std::uint64_t kGuard = 256;

  Side(GpuBackend& backend, Precision precision)
      : stream_(ok(Stream::create(backend))),
        ops(ok(models::Ops::create(backend, stream_.handle(), {.precision = precision}))),
        backend_(backend),
        base_(ok(backend.alloc_arena(kBytes))) {}
  ~Side() { ok(backend_.free_arena(base_)); }
  Side(const Side&) = delete;

  /// Memory of this case: all bits set, which is NaN in every type of float.
  DevicePtr out(std::uint64_t bytes) {
    const DevicePtr at = base_.offset(used_);
    const std::uint64_t all = round_up(bytes, kDeviceAlignment) + kGuard;
    if (used_ + all > kBytes) throw std::runtime_error("the case needs more memory than a Side has");
    ok(backend_.memset_async(at, 0xff, all, stream_.handle()));
    parts_.push_back({used_, bytes});
    used_ += all;
    return at;
  }
  /// The same with contents.
  template <class T>
  DevicePtr in(const std::vector<T>& values) {
    const DevicePtr at = out(values.size() * sizeof(T));
    ok(ops.copy_h2d(at, std::as_bytes(std::span(values))));
    return at;
  }
  /// Null for nothing.
  template <class T>
  DevicePtr maybe(const std::vector<T>& values) {
    return values.empty() ? DevicePtr{} : in(values);
  }
  template <class T>
  std::vector<T> read(DevicePtr from, std::uint64_t count) {
    std::vector<T> values(count);
    ok(backend_.copy_d2h_on_stream(std::as_writable_bytes(std::span(values)), from, stream_.handle()));
    return values;
  }
  /// Ends a case: whether every guard is as it was. The memory is free for the next.
  void end_case() {
    const auto all = read<std::uint8_t>(base_, used_);
    for (const Part& part : parts_) {
      const auto from = all.begin() + static_cast<std::ptrdiff_t>(part.offset + part.bytes);
      const auto to = all.begin() + static_cast<std::ptrdiff_t>(part.offset + round_up(part.bytes, kDeviceAlignment) + kGuard);
      const auto hit = std::find_if(from, to, [](std::uint8_t b) { return b != 0xff; });
      EXPECT_EQ(hit, to) << "written " << hit - from << " bytes behind the end of " << part.bytes << " on " << backend_.name();
    }
    parts_.clear();
    used_ = 0;
  }

 private:
  struct Part {
    std::uint64_t offset, bytes;
  };
  Stream stream_;

 public:
  models::Ops ops;

 private:
  GpuBackend& backend_;
  DevicePtr base_;
  std::uint64_t used_ = 0;
  std::vector<Part> parts_;
};

/// Whether to run a case of this kind. METRALE_TEST_FEW=1 runs the first of each alone: for compute-sanitizer, under which all of
/// them would take many minutes.
inline bool wanted(const std::string& kind) {
  static const char* set = std::getenv("METRALE_TEST_FEW");
  static const bool few = set != nullptr && std::string_view(set) == "1";
  static std::set<std::string> had;
  return had.insert(kind).second || !few;
}

/// The worst that each kernel did, printed when the program ends.
class ParityReport : public ::testing::Environment {
 public:
  struct Line {
    int cases = 0;
    double worst_l2 = 0, worst_ratio = 0;
  };
  static std::map<std::string, Line>& lines() {
    static std::map<std::string, Line> all;
    return all;
  }
  void TearDown() override {
    if (lines().empty()) return;
    std::printf("%-28s %7s %14s %14s\n", "kernel", "cases", "relative L2", "norm ratio - 1");
    for (const auto& [kernel, line] : lines())
      std::printf("%-28s %7d %14.2e %14.2e\n", kernel.c_str(), line.cases, line.worst_l2, line.worst_ratio);
  }
};

inline ::testing::Environment* const parity_report = ::testing::AddGlobalTestEnvironment(new ParityReport);

/// ‖got − want‖ / ‖want‖ and ‖got‖ / ‖want‖ − 1 below their limits. The ratio has the tighter one: rounding cancels in it, a wrong
/// scale does not. Of few `columns` all may come from sums that cancel, so their limits are wider.
inline void expect_close(const std::string& kernel, std::span<const float> got, std::span<const float> want, double tolerance,
                         double columns = HUGE_VAL) {
  tolerance *= 1 + 4 / std::sqrt(columns);
  ASSERT_EQ(got.size(), want.size());
  double difference = 0, norm = 0, got_norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - want[i], 2);
    norm += std::pow(static_cast<double>(want[i]), 2);
    got_norm += std::pow(static_cast<double>(got[i]), 2);
  }
  const double l2 = norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
  const double ratio = norm == 0 ? std::sqrt(got_norm) : std::abs(std::sqrt(got_norm / norm) - 1);
  ParityReport::Line& line = ParityReport::lines()[kernel];
  ++line.cases;
  line.worst_l2 = l2 > line.worst_l2 || std::isnan(l2) ? l2 : line.worst_l2;
  line.worst_ratio = ratio > line.worst_ratio || std::isnan(ratio) ? ratio : line.worst_ratio;
  EXPECT_LT(l2, tolerance) << kernel;
  EXPECT_LT(ratio, tolerance / 2) << kernel;
}

/// A host backend as the oracle and the device under test, made once for a program.
class Parity : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!why_no_device().empty()) return;
    oracle_ = host_backend();
    device_ = ok(open_device());
    want_ = std::make_unique<Side>(*oracle_, Precision::exact);
    fast_ = std::make_unique<Side>(*device_, Precision::fast);
    exact_ = std::make_unique<Side>(*device_, Precision::exact);
  }
  static void TearDownTestSuite() {
    want_.reset(), fast_.reset(), exact_.reset();
    oracle_.reset(), device_.reset();
  }
  void SetUp() override { METRALE_NEEDS_DEVICE(); }

  std::vector<float> normal(std::size_t count, float deviation = 1) {
    std::normal_distribution<float> draw(0, deviation);
    std::vector<float> values(count);
    for (float& v : values) v = draw(random);
    return values;
  }
  /// As a cache or a weight holds them.
  static std::vector<std::byte> stored(const std::vector<float>& values, DType dtype) {
    std::vector<std::byte> bytes(values.size() * (dtype == DType::f32 ? 4 : 2));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::uint16_t half = f32_to_bf16(values[i]);
      if (dtype == DType::f32) std::memcpy(&bytes[4 * i], &values[i], 4);
      if (dtype == DType::bf16) std::memcpy(&bytes[2 * i], &half, 2);
    }
    return bytes;
  }

  Side& want() { return *want_; }
  Side& fast() { return *fast_; }
  Side& exact() { return *exact_; }
  static std::uint32_t id(DType dtype) { return static_cast<std::uint32_t>(dtype); }

  std::mt19937 random{12345};

 private:
  static inline std::unique_ptr<GpuBackend> oracle_, device_;
  static inline std::unique_ptr<Side> want_, fast_, exact_;
};

}  // namespace metrale::test
