// SPDX-License-Identifier: Apache-2.0
//
// WeightStore: a model's weights on a device: one arena for the model, or one for each segment of the plan, and every tensor an
// aligned view into it. The store owns the memory until `release`; views are borrowed. Loading reads each file once from start to
// end through a small staging buffer while earlier parts are on their way to the device. After loading, look-ups may come from any
// thread; freeing and releasing need the store to themselves.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/backend.h"
#include "metrale/model_resource.h"
#include "metrale/result.h"
#include "metrale/weight_file.h"
#include "metrale/weight_plan.h"

namespace metrale {

/// A tensor on the device. Row-major unless a transform of its plan arranged it otherwise.
struct Weight {
  DevicePtr ptr;  ///< Aligned to kDeviceAlignment; null for a tensor without elements.
  DType dtype = DType::f32;
  std::vector<std::uint64_t> shape;
  std::uint64_t size_bytes = 0;
  std::uint32_t segment = 0;
};

/// A tensor that was left on disk.
struct DeferredWeight {
  TensorInfo info;
  std::string path;  ///< The file it is in.
};

struct WeightLoadOptions {
  /// Host memory that one of the two staging buffers takes; more only where a transform's granule of rows needs it.
  std::uint64_t staging_bytes = std::uint64_t{4} << 20;
  /// Tell the system that what was read need not stay cached, for devices that share the host's memory.
  bool drop_page_cache = false;
  /// Device bytes that must stay free beside the weights.
  std::uint64_t reserve_bytes = 0;
  /// Called after each part with the bytes read so far and in all, from the loading thread.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress;
};

/// What a load did.
struct WeightLoadStats {
  std::uint64_t read_bytes = 0;     ///< Bytes asked of the files, small gaps between tensors included.
  std::uint64_t staging_bytes = 0;  ///< Host memory that was taken for the time of the load.
  double seconds = 0;
};

class WeightStore final : public ModelResource {
 public:
  using Site = std::source_location;

  /// Loads `plan`, which was made of `file`.
  /// Ordering: returns when every byte is on the device; any stream may use the weights. Not legal on a thread that
  ///   holds a capture.
  /// Lifetime: `backend` outlives the store; `file` and `plan` may go.
  /// Errors: out_of_memory (no room; says what is missing), io, capture_unsafe, a transform's own, or the backend's. Everything
  ///   taken is given back.
  static Result<std::unique_ptr<WeightStore>> load(GpuBackend& backend, const WeightFile& file, const WeightPlan& plan,
                                                   const WeightLoadOptions& options = {}, Site site = Site::current());
  /// Loads the tensors of these names and no others. Errors: as `WeightPlan::create` and `load`.
  static Result<std::unique_ptr<WeightStore>> load(GpuBackend& backend, const WeightFile& file, std::span<const std::string> names,
                                                   const WeightLoadOptions& options = {}, Site site = Site::current());
  WeightStore(const WeightStore&) = delete;
  WeightStore& operator=(const WeightStore&) = delete;
  /// Releases what is left; a failure is logged.
  ~WeightStore() override;

  /// The weight of that name.
  /// Errors: not_found (never loaded, skipped, deferred or freed: says which, with the names that come nearest).
  Result<Weight> get(std::string_view name) const;
  /// The same without an error: null. Valid until the weight is freed.
  const Weight* find(std::string_view name) const noexcept;
  /// Every weight by name.
  const std::map<std::string, Weight, std::less<>>& weights() const noexcept { return weights_; }
  /// What was left on disk, by name, with numbers in names in numeric order.
  std::span<const DeferredWeight> deferred() const noexcept { return deferred_; }

  /// Device bytes held, padding included.
  std::uint64_t size_bytes() const noexcept;
  const WeightLoadStats& load_stats() const noexcept { return stats_; }

  struct Freed {
    std::uint64_t bytes = 0;             ///< Given back to the device.
    std::vector<std::string> names;      ///< Weights that are gone.
    std::vector<std::string> held_back;  ///< Weights that matched and stay, because others of their segment did not match.
  };
  /// Frees every segment whose weights all match `predicate`. Its weights leave the store before the memory is given back.
  /// Errors: as `GpuBackend::free_arena`; the memory of a segment that could not be freed stays with the store, for `release`.
  Result<Freed> free_matching(const std::function<bool(std::string_view name, const Weight&)>& predicate,
                              Site site = Site::current());

  std::string_view label() const noexcept override { return "weight store"; }
  /// Forgets every weight and frees every segment, going on after failures. A segment that could not be freed is kept for the next
  /// call. Errors: invalid_argument (another backend: nothing is done), otherwise the first of `GpuBackend::free_arena`.
  Result<> release(GpuBackend& backend) override;

 private:
  struct Segment {
    DevicePtr base;
    std::uint64_t bytes = 0;
  };
  explicit WeightStore(GpuBackend& backend) : backend_(backend) {}
  Result<> fill(const WeightFile& file, const WeightPlan& plan, const WeightLoadOptions& options, Site site);

  GpuBackend& backend_;
  std::string source_;  // path of the file, for messages
  std::map<std::uint32_t, Segment> segments_;
  std::map<std::string, Weight, std::less<>> weights_;
  std::vector<DeferredWeight> deferred_;
  std::vector<std::string> freed_;  // sorted
  WeightLoadStats stats_;
};

}  // namespace metrale
