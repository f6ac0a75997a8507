// SPDX-License-Identifier: Apache-2.0
//
// The bridge over kernels that this build has.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include <fmt/format.h>

#include "bridges/cutlass/foreign.h"
#include "bridges/cutlass/launch.h"
#include "metrale/backend.h"
#include "metrale/bridges/cutlass.h"
#include "metrale/bridges/nvfp4.h"
#include "metrale/op_cache.h"

namespace metrale::cutlass {
namespace {

using Site = std::source_location;

// Scratch of a stream: the count of tiles that were taken, on a line of its own, then room for offsets that come from the host.
constexpr std::string_view kScratchTag = "cutlass.grouped";
constexpr std::uint64_t kOffsetsAt = 128;
constexpr std::uint64_t kScratchBytes = kOffsetsAt + (std::uint64_t{kMaxExperts} + 1) * sizeof(std::int32_t);
static_assert(kMaxExperts == kMaxGroups);

/// Addresses that a call names, for the backend.
class Uses {
 public:
  void add(std::string_view what, DevicePtr ptr, std::uint64_t bytes) {
    if (ptr) uses_[count_++] = {what, ptr, bytes};
  }
  std::span<const NativeUse> all() const { return {uses_.data(), count_}; }

 private:
  std::array<NativeUse, 8> uses_{};
  std::size_t count_ = 0;
};

/// Maps of weights, kept so that a call makes none: a model has some hundred matrices.
class WeightMaps {
 public:
  Result<WeightMap> get(DevicePtr weight, std::uint64_t rows, std::uint64_t k, int element_bytes, int box_rows, Site site) {
    const Key key{weight.address, rows, k, static_cast<std::uint64_t>(element_bytes) << 32 | static_cast<std::uint32_t>(box_rows)};
    const std::lock_guard lock(mutex_);
    if (const auto found = maps_.find(key); found != maps_.end()) return found->second;
    WeightMap made;
    METRALE_TRY(translate(make_weight_map(made, weight.address, rows, k, element_bytes, box_rows), site));
    if (maps_.size() >= kMost) maps_.clear();
    maps_.emplace(key, made);
    return made;
  }

 private:
  static constexpr std::size_t kMost = 8192;
  using Key = std::array<std::uint64_t, 4>;
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept {
      std::uint64_t h = 0;
      for (const std::uint64_t word : key) h = (std::rotl(h, 23) ^ word) * 0x9E3779B97F4A7C15ULL;
      return h ^ h >> 32;
    }
  };
  std::mutex mutex_;
  std::unordered_map<Key, WeightMap, Hash> maps_;
};

/// Either call: a dense one is grouped with one expert that has all rows.
struct Product {
  const char* what;
  GroupedCall call;
  DevicePtr offsets;  ///< Null: one expert.
  DevicePtr scratch;  ///< Null: tiles are shared out evenly.
};

class DeviceBridge final : public Bridge {
 public:
  DeviceBridge(GpuBackend& backend, const Chip& chip, bool hopper) : backend_(backend), chip_(chip), hopper_(hopper) {}

  std::string_view kernels() const noexcept override { return hopper_ ? "sm_90a" : "common"; }

  Result<> prepare(StreamHandle stream, Site site) override {
    METRALE_TRY(backend_.op_cache().scratch(kScratchTag, stream, kScratchBytes, site));
    return {};
  }

  Result<> dense(const DenseCall& call, StreamHandle stream, Site site) override {
    METRALE_TRY(check(call, site));
    Product product{.what = "cutlass.dense",
                    .call = {.precision = call.precision,
                             .experts = 1,
                             .rows = call.m,
                             .tokens = call.m,
                             .n = call.n,
                             .k = call.k,
                             .act = call.act,
                             .weight = call.weight,
                             .out = call.out,
                             .act_scales = call.act_scales,
                             .weight_scales = call.weight_scales,
                             .row_index = {},
                             .offsets = {},
                             .host_offsets = {},
                             .act_stride = call.act_stride,
                             .out_stride = call.out_stride,
                             .alpha = call.alpha},
                    .offsets = {},
                    .scratch = {}};
    if (hopper_) return enqueue(product, stream, site);
    if (call.precision == Precision::bf16) return enqueue_common(product.call, stream, site);
    return refuse_precision(call.precision, site);
  }

  Result<> grouped(const GroupedCall& call, StreamHandle stream, Site site) override {
    METRALE_TRY(check(call, site));
    if (!hopper_) {
      return Error(
          Errc::unsupported,
          fmt::format("grouped products need the kernels for sm_90a; this device is of compute capability {}.{} and uses the "
                      "common ones: call `dense` for each expert",
                      chip_.major, chip_.minor),
          site);
    }
    Product product{.what = "cutlass.grouped", .call = call, .offsets = call.offsets, .scratch = {}};
    product.scratch = METRALE_TRY(backend_.op_cache().scratch(kScratchTag, stream, kScratchBytes, site));
    if (!call.offsets) {
      product.offsets = product.scratch.offset(kOffsetsAt);
      METRALE_TRY(backend_.copy_h2d_async(product.offsets, std::as_bytes(call.host_offsets), stream, site));
    }
    return enqueue(product, stream, site);
  }

  Result<> pack(const Nvfp4Call& call, StreamHandle stream, Site site) override { return convert(call, true, stream, site); }
  Result<> unpack(const Nvfp4Call& call, StreamHandle stream, Site site) override { return convert(call, false, stream, site); }

  Result<> dense_nvfp4(const Nvfp4DenseCall& call, StreamHandle stream, Site site) override {
    METRALE_TRY(check(call, site));
    const Nvfp4Kernel* kernel = nvfp4_kernel();
    if (kernel == nullptr) {
      return Error(
          Errc::unsupported,
          fmt::format("NVFP4 products need tensor cores of sm_100a or sm_120a and kernels for them; this device is of compute "
                      "capability {}.{}, and the build is for " METRALE_CUTLASS_TARGETS,
                      chip_.major, chip_.minor),
          site);
    }
    const auto pointer = [](DevicePtr ptr) { return reinterpret_cast<const void*>(ptr.address); };
    const std::uint64_t out_stride = call.out_stride != 0 ? call.out_stride : call.n;
    const Nvfp4GemmArguments arguments{.act = pointer(call.act),
                                       .act_scales = pointer(call.act_scales),
                                       .weight = pointer(call.weight),
                                       .weight_scales = pointer(call.weight_scales),
                                       .out = reinterpret_cast<void*>(call.out.address),
                                       .out_stride = static_cast<std::int64_t>(out_stride),
                                       .m = static_cast<int>(call.m),
                                       .n = static_cast<int>(call.n),
                                       .k = static_cast<int>(call.k),
                                       .sm_count = chip_.sm_count,
                                       .alpha = call.alpha};
    Uses uses;
    uses.add("act", call.act, std::uint64_t{call.m} * call.k / 2);
    uses.add("act_scales", call.act_scales, tiled_scale_bytes(call.m, call.k));
    uses.add("weight", call.weight, std::uint64_t{call.n} * call.k / 2);
    uses.add("weight_scales", call.weight_scales, tiled_scale_bytes(call.n, call.k));
    uses.add("out", call.out, ((std::uint64_t{call.m} - 1) * out_stride + call.n) * 2);
    DevicePtr workspace;
    if (const std::size_t bytes = kernel->workspace_bytes(arguments); bytes != 0) {
      workspace = METRALE_TRY(backend_.op_cache().scratch("cutlass.nvfp4", stream, bytes, site));
      uses.add("scratch", workspace, bytes);
    }
    return backend_.enqueue_native(
        "cutlass.dense_nvfp4", stream, uses.all(),
        [&](std::uint64_t native) {
          return translate(kernel->launch(arguments, reinterpret_cast<void*>(workspace.address), native), site);
        },
        site);
  }

 private:
  /// Null: none for this chip.
  const Nvfp4Kernel* nvfp4_kernel() const noexcept {
#ifdef METRALE_CUTLASS_SM100
    if (chip_.major == 10 && chip_.minor == 0) return &kNvfp4Sm100;
#endif
#ifdef METRALE_CUTLASS_SM120
    if (chip_.major == 12 && chip_.minor == 0) return &kNvfp4Sm120;
#endif
    return nullptr;
  }

  Result<> convert(const Nvfp4Call& call, bool pack, StreamHandle stream, Site site) {
    METRALE_TRY(check(call, site));
    const std::uint64_t count = std::uint64_t{call.rows} * call.cols;
    Uses uses;
    uses.add("plain", call.plain, count * 2);
    uses.add("values", call.values, count / 2);
    uses.add("scales", call.scales, call.tiled_scales ? tiled_scale_bytes(call.rows, call.cols) : count / kNvfp4Group);
    const Nvfp4Arguments arguments{.plain = reinterpret_cast<void*>(call.plain.address),
                                   .values = reinterpret_cast<std::uint8_t*>(call.values.address),
                                   .scales = reinterpret_cast<std::uint8_t*>(call.scales.address),
                                   .rows = call.rows,
                                   .cols = call.cols,
                                   .alpha = call.alpha,
                                   .tiled = call.tiled_scales};
    return backend_.enqueue_native(
        pack ? "cutlass.pack" : "cutlass.unpack", stream, uses.all(),
        [&](std::uint64_t native) { return translate(launch_nvfp4(arguments, pack, native), site); }, site);
  }

  Result<> refuse_precision(Precision precision, Site site) const {
    return Error(Errc::unsupported,
                 fmt::format("{} needs the kernels for sm_90a; this device is of compute capability {}.{} and uses the common ones",
                             to_string(precision), chip_.major, chip_.minor),
                 site);
  }

  static Uses uses_of(const GroupedCall& c) {
    const std::uint64_t element = c.precision == Precision::bf16 ? 2 : 1;
    const std::uint64_t blocks = div_ceil(c.k, kScaleBlock);
    const std::uint64_t act_stride = c.act_stride != 0 ? c.act_stride : c.k;
    const std::uint64_t out_stride = c.out_stride != 0 ? c.out_stride : c.n;
    Uses uses;
    uses.add("act", c.act, ((std::uint64_t{c.tokens} - 1) * act_stride + c.k) * element);
    uses.add("weight", c.weight, std::uint64_t{c.experts} * c.n * c.k * element);
    uses.add("out", c.out, ((std::uint64_t{c.rows} - 1) * out_stride + c.n) * 2);
    uses.add("act_scales", c.act_scales, c.tokens * blocks * sizeof(float));
    uses.add("weight_scales", c.weight_scales, c.experts * div_ceil(c.n, kScaleBlock) * blocks * sizeof(float));
    uses.add("row_index", c.row_index, std::uint64_t{c.rows} * sizeof(std::int32_t));
    return uses;
  }

  /// Wide tiles move less through the L2 cache; narrow ones are for products with fewer tiles than the device has processors.
  const HopperKernel& choose(const GroupedCall& c) const {
    if (c.precision == Precision::fp8_block) return kHopperFp8;
    const std::uint64_t wide_tiles = std::max<std::uint64_t>(div_ceil(c.rows, 128), c.experts) * div_ceil(c.n, 256);
    return wide_tiles < static_cast<std::uint64_t>(chip_.sm_count) || c.n <= 128 ? kHopperBf16Narrow : kHopperBf16Wide;
  }

  Result<> enqueue(const Product& product, StreamHandle stream, Site site) {
    const GroupedCall& c = product.call;
    const int element = c.precision == Precision::bf16 ? 2 : 1;
    const HopperKernel& kernel = choose(c);
    const WeightMap map = METRALE_TRY(maps_.get(c.weight, std::uint64_t{c.experts} * c.n, c.k, element, kernel.columns, site));
    const auto pointer = [](DevicePtr ptr) { return reinterpret_cast<const void*>(ptr.address); };
    const HopperArguments arguments{
        .act = pointer(c.act),
        .row_index = static_cast<const std::int32_t*>(pointer(c.row_index)),
        .offsets = static_cast<const std::int32_t*>(pointer(product.offsets)),
        .next_tile = reinterpret_cast<unsigned*>(product.scratch.address),
        .out = reinterpret_cast<void*>(c.out.address),
        .act_scales = static_cast<const float*>(pointer(c.act_scales)),
        .weight_scales = static_cast<const float*>(pointer(c.weight_scales)),
        .act_stride = (c.act_stride != 0 ? c.act_stride : c.k) * static_cast<std::uint64_t>(element),
        .act_scale_stride = div_ceil(c.k, kScaleBlock),
        .out_stride = c.out_stride != 0 ? c.out_stride : c.n,
        .groups = static_cast<std::int32_t>(c.experts),
        .rows = static_cast<std::int32_t>(c.rows),
        .tokens = static_cast<std::int32_t>(c.tokens),
        .n = static_cast<std::int32_t>(c.n),
        .k = static_cast<std::int32_t>(c.k),
        .column_tiles = static_cast<std::int32_t>(div_ceil(c.n, static_cast<std::uint64_t>(kernel.columns))),
        .weight_scale_rows = static_cast<std::int32_t>(div_ceil(c.n, kScaleBlock)),
        .alpha = c.alpha};
    // Sizes of groups are the device's to know; this many tiles there can be.
    const std::uint64_t most_tiles = (c.rows / 128 + std::uint64_t{c.experts}) * static_cast<std::uint64_t>(arguments.column_tiles);
    const auto blocks = static_cast<unsigned>(std::min<std::uint64_t>(most_tiles, static_cast<std::uint64_t>(chip_.sm_count)));
    Uses uses = uses_of(c);
    uses.add("scratch", product.scratch, kOffsetsAt);
    uses.add("offsets", product.offsets, (std::uint64_t{c.experts} + 1) * sizeof(std::int32_t));
    return backend_.enqueue_native(
        product.what, stream, uses.all(),
        [&](std::uint64_t native) { return translate(kernel.launch(map, arguments, blocks, native), site); }, site);
  }

  Result<> enqueue_common(const GroupedCall& c, StreamHandle stream, Site site) {
    const CommonArguments arguments{.act = reinterpret_cast<const void*>(c.act.address),
                                    .weight = reinterpret_cast<const void*>(c.weight.address),
                                    .out = reinterpret_cast<void*>(c.out.address),
                                    .act_stride = static_cast<std::int64_t>(c.act_stride != 0 ? c.act_stride : c.k),
                                    .out_stride = static_cast<std::int64_t>(c.out_stride != 0 ? c.out_stride : c.n),
                                    .m = static_cast<int>(c.rows),
                                    .n = static_cast<int>(c.n),
                                    .k = static_cast<int>(c.k),
                                    .alpha = c.alpha};
    const Uses uses = uses_of(c);
    return backend_.enqueue_native(
        "cutlass.dense", stream, uses.all(),
        [&](std::uint64_t native) { return translate(launch_common_bf16(arguments, native), site); }, site);
  }

  GpuBackend& backend_;
  Chip chip_;
  bool hopper_;
  WeightMaps maps_;
};

}  // namespace

BridgeStatus status() {
  return {.library = "CUTLASS",
          .is_available = true,
          .text = METRALE_CUTLASS_VERSION " headers, compiled for " METRALE_CUTLASS_TARGETS};
}

Result<std::unique_ptr<Bridge>> Bridge::create(GpuBackend& backend, const BridgeOptions& options, Site site) {
  if (backend.name() != "cuda" || !backend.capabilities().has(Capability::native_work)) {
    return Error(Errc::unsupported, fmt::format("CUTLASS needs the CUDA backend; this is {}", backend.name()), site);
  }
  METRALE_TRY(backend.bind_to_thread(site));
  Chip chip;
  METRALE_TRY(translate(query_chip(chip), site));
  bool hopper = false;
#ifdef METRALE_CUTLASS_HOPPER
  if (chip.major == 9 && !options.common_kernels) {
    for (const HopperKernel* kernel : {&kHopperBf16Wide, &kHopperBf16Narrow, &kHopperFp8})
      METRALE_TRY(translate(kernel->ready(), site));
    hopper = true;
  }
#endif
  if (!hopper) {
    if (const Foreign ready = common_bf16_ready(); !ready.ok()) {
      return Error(Errc::unsupported,
                   fmt::format("the CUTLASS kernels were compiled for " METRALE_CUTLASS_TARGETS
                               "; this device is of compute capability {}.{}: add its target to METRALE_CUDA_TARGETS",
                               chip.major, chip.minor),
                   site)
          .with_native(ready.code, ready.text);
    }
  }
  return std::make_unique<DeviceBridge>(backend, chip, hopper);
}

}  // namespace metrale::cutlass
