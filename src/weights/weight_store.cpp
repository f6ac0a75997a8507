// SPDX-License-Identifier: Apache-2.0
#include "metrale/weight_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "core/release_log.h"
#include "core/text.h"
#include "weights/tensor_table.h"
#include "weights/weight_loader.h"

namespace metrale {

using detail::quote;

Result<std::unique_ptr<WeightStore>> WeightStore::load(GpuBackend& backend, const WeightFile& file, const WeightPlan& plan,
                                                       const WeightLoadOptions& options, Site site) {
  const std::string label = file.path().native();
  return detail::guarded(label, [&]() -> Result<std::unique_ptr<WeightStore>> {
    std::unique_ptr<WeightStore> store(new WeightStore(backend));
    store->source_ = label;
    const auto start = std::chrono::steady_clock::now();
    Result<> filled = store->fill(file, plan, options, site);
    if (!filled) {
      const Result<> undone = store->release(backend);
      if (!undone) return std::move(filled).error().with_note("giving back the memory failed too: " + undone.error().message());
      return std::move(filled).error();
    }
    store->stats_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return store;
  });
}

Result<std::unique_ptr<WeightStore>> WeightStore::load(GpuBackend& backend, const WeightFile& file,
                                                       std::span<const std::string> names, const WeightLoadOptions& options,
                                                       Site site) {
  const WeightPlan plan = METRALE_TRY(WeightPlan::create(file, names));
  return load(backend, file, plan, options, site);
}

Result<> WeightStore::fill(const WeightFile& file, const WeightPlan& plan, const WeightLoadOptions& options, Site site) {
  for (const TensorInfo* tensor : plan.deferred()) deferred_.push_back({*tensor, file.file_label(tensor->file)});
  if (plan.device_bytes() != 0) METRALE_TRY(plan.check_fits(backend_, options.reserve_bytes));
  for (const auto& [segment, bytes] : plan.segments()) {
    const DevicePtr base = METRALE_TRY(backend_.alloc_arena(bytes, site));
    segments_[segment] = {base, bytes};
  }
  const auto address = [&](const WeightPlan::Entry& entry) { return segments_.at(entry.segment).base.offset(entry.offset); };
  const std::vector<weights::LoadRead> reads = weights::cut_into_reads(plan, options.staging_bytes);
  METRALE_TRY(weights::run_reads(backend_, file, plan, reads, address, options, stats_, site));
  for (const WeightPlan::Entry& entry : plan.entries()) {
    const DevicePtr ptr = entry.size_bytes == 0 ? DevicePtr{} : address(entry);
    weights_.emplace(entry.tensor->name, Weight{ptr, entry.dtype, entry.shape, entry.size_bytes, entry.segment});
  }
  return {};
}

WeightStore::~WeightStore() {
  const Result<> released = release(backend_);
  if (!released) detail::log_warning_noexcept("weights of {}: {}", source_, released.error().to_string());
}

Result<Weight> WeightStore::get(std::string_view name) const {
  if (const Weight* weight = find(name)) return *weight;
  const auto at = std::find_if(deferred_.begin(), deferred_.end(), [&](const DeferredWeight& d) { return d.info.name == name; });
  if (at != deferred_.end()) {
    return Error(Errc::not_found, fmt::format("{}: weight {} was deferred; it is still in {}", source_, quote(name), at->path));
  }
  if (std::binary_search(freed_.begin(), freed_.end(), name)) {
    return Error(Errc::not_found, fmt::format("{}: weight {} was freed", source_, quote(name)));
  }
  std::vector<std::string_view> names;
  for (const auto& [key, weight] : weights_) names.push_back(key);
  return Error(Errc::not_found, fmt::format("{}: no weight {} among the {} loaded{}", source_, quote(name), names.size(),
                                            weights::nearest_text(weights::nearest_names(name, names, 3))));
}

const Weight* WeightStore::find(std::string_view name) const noexcept {
  const auto at = weights_.find(name);
  return at == weights_.end() ? nullptr : &at->second;
}

std::uint64_t WeightStore::size_bytes() const noexcept {
  std::uint64_t total = 0;
  for (const auto& [id, segment] : segments_) total += segment.bytes;
  return total;
}

Result<WeightStore::Freed> WeightStore::free_matching(const std::function<bool(std::string_view, const Weight&)>& predicate,
                                                      Site site) {
  std::set<std::uint32_t> matched;
  std::set<std::uint32_t> kept;
  for (const auto& [name, weight] : weights_) (predicate(name, weight) ? matched : kept).insert(weight.segment);

  Freed freed;
  std::set<std::uint32_t> whole;
  for (const std::uint32_t segment : matched) {
    if (!kept.contains(segment)) whole.insert(segment);
  }
  for (auto at = weights_.begin(); at != weights_.end();) {
    if (whole.contains(at->second.segment)) {
      freed.names.push_back(at->first);
      at = weights_.erase(at);
      continue;
    }
    if (matched.contains(at->second.segment) && predicate(at->first, at->second)) freed.held_back.push_back(at->first);
    ++at;
  }
  freed_.insert(freed_.end(), freed.names.begin(), freed.names.end());
  std::sort(freed_.begin(), freed_.end());

  Result<> first;
  for (const std::uint32_t id : whole) {
    const auto at = segments_.find(id);
    if (at == segments_.end()) continue;  // a segment of empty tensors has no memory
    Result<> result = backend_.free_arena(at->second.base, site);
    if (result) {
      freed.bytes += at->second.bytes;
      segments_.erase(at);
    } else if (first) {
      first = std::move(result);
    }
  }
  if (!first) return std::move(first).error();
  return freed;
}

Result<> WeightStore::release(GpuBackend& backend) {
  if (&backend != &backend_) {
    return Error(Errc::invalid_argument, "release of the weight store on another backend than the one it was made on");
  }
  weights_.clear();
  Result<> first;
  for (auto at = segments_.begin(); at != segments_.end();) {
    Result<> result = backend.free_arena(at->second.base);
    if (result) {
      at = segments_.erase(at);
      continue;
    }
    if (first) first = std::move(result);
    ++at;
  }
  return first;
}

}  // namespace metrale
