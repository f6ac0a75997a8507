// SPDX-License-Identifier: Apache-2.0
#include "bench/profile.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>

#include <fmt/format.h>

#include "metrale/dtype.h"
#include "metrale/models/matmul_kernels.h"
#include "metrale/observer.h"

namespace metrale::bench {
namespace {

constexpr std::uint32_t kMostMarks = 4'096;
constexpr std::uint32_t kEmptyMarks = 64;
constexpr std::uint64_t kHoldNs = 20'000'000;  // longer than the host takes to launch a step

struct Launched {
  KernelHandle kernel;
  Dim3 grid;
  LinearParams product;  ///< Of a matrix kernel, else zeros.
};

/// Notes each launch, and once it has a stream puts an event behind it. The driver is called directly: an observer may not call the
/// backend.
class Marker final : public Observer {
 public:
  explicit Marker(RawDevice& raw) : raw_(raw) { launches_.reserve(kMostMarks); }

  void on_launch_args(const OpRecord&, std::span<const KernelArg> args) noexcept override {
    product_ = {};
    if (!args.empty() && args.back().size_bytes() == sizeof(product_)) std::memcpy(&product_, args.back().data(), sizeof(product_));
  }
  void on_op(const OpRecord& record) noexcept override {
    if (record.op != Op::launch || record.outcome != 0 || failure_) return;
    stream_ = record.stream;
    if (native_ == 0) return;
    if (Result<> marked = raw_.mark(native_); !marked) {
      failure_ = std::move(marked).error();
      return;
    }
    launches_.push_back({record.kernel, record.grid, product_});  // there is room: each mark needed an event
  }

  StreamHandle stream() const noexcept { return stream_; }
  void mark_on(std::uint64_t native) noexcept { native_ = native; }
  const std::vector<Launched>& launches() const noexcept { return launches_; }
  const std::optional<Error>& failure() const noexcept { return failure_; }

 private:
  RawDevice& raw_;
  StreamHandle stream_;
  std::uint64_t native_ = 0;
  std::vector<Launched> launches_;
  LinearParams product_;
  std::optional<Error> failure_;
};

struct Weights {
  std::string shape;
  std::uint64_t bytes = 0;
};

/// What a launch of linear, linear4 or swiglu reads; the last takes two matrices of one height, of which both are there.
Weights weights_of(const LinearParams& p) {
  Weights all;
  for (const LinearMatrix& w : p.w) {
    if (w.n == 0) continue;
    all.shape += fmt::format("{}{}", all.shape.empty() ? " " : "+", w.n);
    all.bytes += size_bytes(static_cast<DType>(w.dtype), std::uint64_t{w.n} * p.k).value_or(0);
  }
  if (!all.shape.empty()) all.shape += fmt::format(" x {}", p.k);
  return all;
}

/// One token, launch by launch: what is scored goes through no graph.
Result<> step(Decoder& decoder, Sequence& sequence) {
  const TokenId id = 1;
  METRALE_TRY(decoder.append_scores(sequence, {&id, 1}, {&id, 1}));
  return {};
}

Result<double> event_seconds(RawDevice& raw, std::uint64_t native) {
  METRALE_TRY(raw.reset_marks(kEmptyMarks));
  METRALE_TRY(raw.hold(native, kHoldNs / 4));
  for (std::uint32_t i = 0; i < kEmptyMarks; ++i) METRALE_TRY(raw.mark(native));
  return summarise(METRALE_TRY(raw.mark_seconds())).median;
}

Result<Profile> profile_with(Session& session, Marker& marker, Decoder& decoder, Sequence& sequence) {
  RawDevice& raw = *session.raw();
  METRALE_TRY(step(decoder, sequence));
  if (!marker.stream()) return Error(Errc::internal, "the step launched nothing that the profile could see");
  const std::uint64_t native = METRALE_TRY(session.backend().native_stream(marker.stream()));
  Profile profile;
  profile.event_us = METRALE_TRY(event_seconds(raw, native)) * 1e6;
  METRALE_TRY(raw.reset_marks(kMostMarks));
  METRALE_TRY(raw.hold(native, kHoldNs));
  METRALE_TRY(raw.mark(native));
  marker.mark_on(native);
  METRALE_TRY(step(decoder, sequence));
  if (marker.failure()) return Error(*marker.failure());
  const std::vector<double> seconds = METRALE_TRY(raw.mark_seconds());
  if (seconds.size() != marker.launches().size()) return Error(Errc::internal, "the profile has lost events");

  std::map<std::string, KernelShare> shares;
  for (std::size_t i = 0; i < seconds.size(); ++i) {
    const Launched& launched = marker.launches()[i];
    const std::string kernel = session.backend().kernel_name(launched.kernel);
    const Weights weights = kernel.starts_with(kMatmulModule) ? weights_of(launched.product) : Weights{};
    const std::string name = fmt::format("{} {}x{}x{}{}", kernel, launched.grid.x, launched.grid.y, launched.grid.z, weights.shape);
    KernelShare& share = shares[name];
    share.kernel = name;
    ++share.launches;
    share.total_us += seconds[i] * 1e6;
    share.weight_bytes += weights.bytes;
    profile.launched_us += seconds[i] * 1e6;
  }
  for (auto& [name, share] : shares) profile.kernels.push_back(std::move(share));
  std::ranges::sort(profile.kernels, std::ranges::greater(), &KernelShare::total_us);
  return profile;
}

}  // namespace

Result<Profile> profile_step(Session& session, Decoder& decoder, Sequence& sequence, std::string name, double seconds) {
  Marker marker(*session.raw());
  session.backend().attach(marker);
  Result<Profile> profile = profile_with(session, marker, decoder, sequence);
  session.backend().detach(marker);
  if (!profile) return profile;
  profile->model = std::move(name);
  profile->step_us = seconds * 1e6;
  return profile;
}

}  // namespace metrale::bench
