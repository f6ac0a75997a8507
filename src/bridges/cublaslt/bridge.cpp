// SPDX-License-Identifier: Apache-2.0
#include "bridges/cublaslt/bridge.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <new>

#include <fmt/format.h>

#include "bridges/cublaslt/planner.h"
#include "bridges/cublaslt/shape.h"
#include "bridges/cublaslt/tuner.h"
#include "metrale/backend.h"
#include "metrale/launch.h"
#include "metrale/log.h"
#include "metrale/op_cache.h"
#include "metrale/switches.h"

namespace metrale::cublaslt {
namespace {

using Site = std::source_location;

constexpr std::uint32_t kMostCandidates = 64;
constexpr std::uint64_t kMostWorkspace = std::uint64_t{4} << 30;
constexpr std::uint32_t kTransposeTile = 32;
constexpr std::uint32_t kPrewarmed = 64;

/// Nothing throws out of the bridge.
template <class Body>
auto guarded(const Body& body, Site site) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Error::no_memory();
  } catch (const std::exception& e) {
    return Error(Errc::internal, e.what(), site);
  }
}

class Bridge final : public CublasLt {
 public:
  Bridge(GpuBackend& backend, const Api& api, cublasLtHandle_t handle, std::string version, const std::string& identity,
         const Options& options)
      : backend_(backend),
        api_(api),
        handle_(handle),
        version_(std::move(version)),
        options_(options),
        planner_(backend, api, handle, options, identity) {}
  ~Bridge() override {
    // In a fork the handle is the parent's.
    if (backend_.in_forked_child() || !backend_.bind_to_thread()) return;
    api_.destroy(handle_);
  }

  Result<> matmul(const Call& call, StreamHandle stream, Site site) override {
    METRALE_TRY(check(call, site));
    if (has_odd_rows(call)) [[unlikely]]
      return guarded([&] { return run_odd_rows(call, stream, site); }, site);
    return enqueue(call, call.m, stream, site);
  }

  Result<> prepare(const Call& shape, StreamHandle stream, Site site) override {
    return guarded(
        [&]() -> Result<> {
          METRALE_TRY(check_shape(shape, site));
          Call call = shape;
          if (has_odd_rows(shape)) {
            if (!shape.rows_padded) {
              const OddRows odd(shape);
              METRALE_TRY(backend_.op_cache().scratch(kRowsTag, stream, odd.bytes, site));
              call.act_stride = call.out_stride = 0;
            }
            call.m = library_rows(shape);
          }
          const Plan* plan = METRALE_TRY(plan_for(call, true, site));
          if (plan->workspace_bytes != 0) {
            METRALE_TRY(backend_.op_cache().scratch(kWorkspaceTag, stream, options_.workspace_bytes, site));
          }
          if (transposes(call)) METRALE_TRY(backend_.op_cache().scratch(kScalesTag, stream, scale_bytes(call), site));
          return {};
        },
        site);
  }

  bool prewarm(StreamHandle stream, Site site) override {
    const auto run = [&]() -> Result<> {
      constexpr std::uint64_t kBytes = std::uint64_t{kPrewarmed} * kPrewarmed * 2;
      const DeviceBuffer memory = METRALE_TRY(DeviceBuffer::create(backend_, 3 * kBytes, site));
      METRALE_TRY(backend_.memset_async(memory.ptr(), 0, 3 * kBytes, stream, site));
      METRALE_TRY(backend_.op_cache().scratch(kWorkspaceTag, stream, std::max<std::uint64_t>(options_.workspace_bytes, 1), site));
      Call call;
      call.m = call.n = call.k = kPrewarmed;
      call.act = memory.ptr();
      call.weight = memory.ptr().offset(kBytes);
      call.out = memory.ptr().offset(2 * kBytes);
      const Plan* plan = METRALE_TRY(plan_for(call, false, site));
      return enqueue_with(*plan, call, {}, stream, site);
    };
    if (const Result<> done = guarded(run, site); !done) {
      log(LogLevel::warning, fmt::format("cuBLASLt is not warmed up: {}", done.error().to_string()));
      return false;
    }
    return true;
  }

  Counts counts() const override { return planner_.counts(); }
  std::string_view version() const noexcept override { return version_; }

  Result<> release(GpuBackend& backend) override {
    if (&backend != &backend_) return Error(Errc::invalid_argument, "these plans are of another backend");
    planner_.clear();
    return {};
  }

 private:
  /// Where act and out lie in scratch while a call is brought to a number of rows that the library takes.
  struct OddRows {
    explicit OddRows(const Call& call)
        : act_bytes(std::uint64_t{library_rows(call)} * call.k),
          out_at(round_up(act_bytes, kDeviceAlignment)),
          bytes(out_at + std::uint64_t{library_rows(call)} * call.n * out_bytes(call)) {}
    std::uint64_t act_bytes;
    std::uint64_t out_at;
    std::uint64_t bytes;
  };

  static bool transposes(const Call& c) noexcept { return c.precision == Precision::fp8_block && !c.scales_transposed; }
  static std::uint64_t scale_bytes(const Call& c) noexcept {
    return std::uint64_t{library_rows(c)} * div_ceil(c.k, kScaleBlock) * sizeof(float);
  }

  Result<const Plan*> plan_for(const Call& call, bool may_measure, Site site) {
    const Plan* plan = planner_.find(call);
    if (plan != nullptr && !plan->provisional) [[likely]]
      return plan;
    return guarded([&] { return planner_.make(call, may_measure, site); }, site);
  }

  /// `scale_rows`: rows of `act_scales` where we transpose them.
  Result<> enqueue(const Call& call, std::uint32_t scale_rows, StreamHandle stream, Site site) {
    const Plan* plan = METRALE_TRY(plan_for(call, true, site));
    DevicePtr scales = call.act_scales;
    if (transposes(call)) scales = METRALE_TRY(transpose(call, scale_rows, stream, site));
    Result<> enqueued = enqueue_with(*plan, call, scales, stream, site);
    if (enqueued || !planner_.is_refusal(*plan, enqueued.error())) [[likely]]
      return enqueued;
    plan = METRALE_TRY(guarded([&] { return planner_.make_exception(*plan, call, site); }, site));
    return enqueue_with(*plan, call, scales, stream, site);
  }

  Result<> enqueue_with(const Plan& plan, const Call& c, DevicePtr scales, StreamHandle stream, Site site) {
    const Extents e = extents_of(c);
    std::array<NativeUse, 8> uses;
    std::size_t num_uses = 0;
    const auto add = [&](std::string_view what, DevicePtr ptr, std::uint64_t bytes) { uses[num_uses++] = {what, ptr, bytes}; };
    add("act", c.act, e.act);
    add("weight", c.weight, e.weight);
    add("out", c.out, e.out);
    if (c.bias) add("bias", c.bias, e.bias);
    if (c.residual) add("residual", c.residual, e.residual);
    if (c.precision != Precision::bf16) {
      add("act_scales", scales, transposes(c) ? scale_bytes(c) : e.act_scales);
      add("weight_scales", c.weight_scales, e.weight_scales);
    }
    DevicePtr workspace;
    if (plan.workspace_bytes != 0) {
      workspace = METRALE_TRY(backend_.op_cache().scratch(kWorkspaceTag, stream, options_.workspace_bytes, site));
      add("workspace", workspace, plan.workspace_bytes);
    }
    return backend_.enqueue_native(
        "cublaslt.matmul", stream, {uses.data(), num_uses},
        [&](std::uint64_t native) {
          return api_.check(launch(api_, handle_, plan, c, c.m, scales, workspace, native), "cublasLtMatmul", site);
        },
        site);
  }

  Result<DevicePtr> transpose(const Call& c, std::uint32_t rows, StreamHandle stream, Site site) {
    const auto blocks = static_cast<std::uint32_t>(div_ceil(c.k, kScaleBlock));
    METRALE_TRY(backend_.check_memory("act_scales", c.act_scales, std::uint64_t{rows} * blocks * sizeof(float), site));
    const auto kernel = METRALE_TRY(backend_.op_cache().kernel(kBridgeModule, "transpose_scales", site));
    const DevicePtr scales = METRALE_TRY(backend_.op_cache().scratch(kScalesTag, stream, scale_bytes(c), site));
    METRALE_TRY(Launch(backend_, kernel.handle)
                    .grid({static_cast<std::uint32_t>(div_ceil(c.m, kTransposeTile)),
                           static_cast<std::uint32_t>(div_ceil(blocks, kTransposeTile))})
                    .block({kTransposeTile, 8})
                    .arg_ptr(c.act_scales)
                    .arg_ptr(scales)
                    .arg_u32(rows)
                    .arg_u32(blocks)
                    .arg_u32(c.m)
                    .launch(stream, site));
    return scales;
  }

  Result<> run_odd_rows(const Call& call, StreamHandle stream, Site site) {
    Call whole = call;
    whole.m = library_rows(call);
    if (call.rows_padded) return enqueue(whole, call.m, stream, site);
    // What is copied lies in known memory, or the copies refuse; the scales are looked at before anything is enqueued.
    const Strides s = strides_of(call);
    const OddRows odd(call);
    METRALE_TRY(plan_for(without_strides(whole), true, site));
    const DevicePtr scratch = METRALE_TRY(backend_.op_cache().scratch(kRowsTag, stream, odd.bytes, site));
    METRALE_TRY(backend_.check_memory("out", call.out, extents_of(call).out, site));
    METRALE_TRY(backend_.copy_d2d_2d_async({.dst = scratch,
                                            .src = call.act,
                                            .dst_pitch_bytes = call.k,
                                            .src_pitch_bytes = s.act,
                                            .width_bytes = call.k,
                                            .height = call.m},
                                           stream, site));
    const std::uint64_t used = std::uint64_t{call.m} * call.k;
    METRALE_TRY(backend_.memset_async(scratch.offset(used), 0, odd.act_bytes - used, stream, site));
    whole = without_strides(whole);
    whole.act = scratch;
    whole.out = scratch.offset(odd.out_at);
    METRALE_TRY(enqueue(whole, call.m, stream, site));
    const std::uint64_t element = out_bytes(call);
    return backend_.copy_d2d_2d_async({.dst = call.out,
                                       .src = whole.out,
                                       .dst_pitch_bytes = s.out * element,
                                       .src_pitch_bytes = call.n * element,
                                       .width_bytes = call.n * element,
                                       .height = call.m},
                                      stream, site);
  }
  static Call without_strides(Call call) noexcept {
    call.act_stride = call.out_stride = 0;
    return call;
  }

  GpuBackend& backend_;
  const Api& api_;
  cublasLtHandle_t handle_;
  std::string version_;
  Options options_;
  Planner planner_;
};

}  // namespace

Result<std::unique_ptr<CublasLt>> make_bridge(GpuBackend& backend, const Api& api, std::string version, std::string identity,
                                              Options options, Site site) {
  if (options.candidates == 0 || options.candidates > kMostCandidates) {
    return Error(Errc::invalid_argument, fmt::format("{} candidates; there are 1 to {}", options.candidates, kMostCandidates),
                 site);
  }
  if (options.workspace_bytes > kMostWorkspace) {
    return Error(Errc::invalid_argument,
                 fmt::format("a workspace of {} bytes for each stream; at most {}", options.workspace_bytes, kMostWorkspace), site);
  }
  if (!options.cache_folder) options.cache_folder = switches().cublaslt_cache;
  METRALE_TRY(backend.bind_to_thread(site));
  cublasLtHandle_t handle = nullptr;
  METRALE_TRY(api.check(api.create(&handle), "cublasLtCreate", site));
  return guarded(
      [&]() -> Result<std::unique_ptr<CublasLt>> {
        try {
          return std::make_unique<Bridge>(backend, api, handle, std::move(version), identity, options);
        } catch (...) {
          api.destroy(handle);
          throw;
        }
      },
      site);
}

Result<std::unique_ptr<CublasLt>> CublasLt::create(GpuBackend& backend, Options options, Site site) {
  if (backend.name() != "cuda" || !backend.capabilities().has(Capability::native_work)) {
    return Error(Errc::unsupported, fmt::format("cuBLASLt needs the CUDA backend; this is {}", backend.name()), site);
  }
  const Library* library = METRALE_TRY(Library::load(site));
  METRALE_TRY(backend.bind_to_thread(site));
  const std::string device = METRALE_TRY(describe_device(site));
  return make_bridge(backend, library->api, library->version, fmt::format("{}, cuBLASLt {}", device, library->api.get_version()),
                     std::move(options), site);
}

}  // namespace metrale::cublaslt
