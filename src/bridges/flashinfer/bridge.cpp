// SPDX-License-Identifier: Apache-2.0
#include "bridges/flashinfer/bridge.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

#include "metrale/op_cache.h"

namespace metrale::flashinfer {
namespace {

// Of cudaError_t; the header of CUDA's runtime is not included by the host's compiler.
constexpr int kMemoryAllocation = 2;
constexpr int kInvalidDeviceFunction = 98;
constexpr int kNoKernelImage = 209;
constexpr int kNotSupported = 801;

constexpr std::string_view kSampleTag = "flashinfer.sample";

/// Scratch of sampling: [probabilities | validity | partial softmax].
struct SampleScratch {
  std::uint64_t valid = 0;
  std::uint64_t workspace = 0;
  std::uint64_t workspace_bytes = 0;
  std::uint64_t bytes = 0;

  SampleScratch(std::uint64_t rows, std::uint64_t vocabulary) noexcept {
    // Two floats for each 8,192 logits of a row, where FlashInfer splits rows.
    constexpr std::uint64_t kSlice = 8'192;
    workspace_bytes = round_up(rows * div_ceil(vocabulary, kSlice) * 2 * sizeof(float), kDeviceAlignment);
    valid = round_up(rows * vocabulary * sizeof(float), kDeviceAlignment);
    workspace = valid + round_up(rows, kDeviceAlignment);
    bytes = workspace + workspace_bytes;
  }
};

std::string head_dims() {
  std::set<std::uint32_t> dims;
  for (const fi::DecodeInstance* instance : fi::decode_instances()) dims.insert(instance->head_dim);
  return fmt::format("{}", fmt::join(dims, ", "));
}

class BridgeOf final : public Bridge {
 public:
  BridgeOf(GpuBackend& backend, const fi::Device& device) noexcept : backend_(backend), device_(device) {}

  Result<std::unique_ptr<AttentionPlan>> make_plan(const AttentionShape& shape, const PlanOptions& options,
                                                   std::source_location site) override {
    METRALE_TRY(check(shape, options, site));
    return make_attention_plan(backend_, device_, shape, options, site);
  }

  Result<> add_rms_norm(const AddNormCall& call, StreamHandle stream, std::source_location site) override {
    METRALE_TRY(check(call, site));
    const std::uint64_t x_stride = call.x_stride == 0 ? call.columns : call.x_stride;
    const std::uint64_t residual_stride = call.residual_stride == 0 ? call.columns : call.residual_stride;
    const auto bytes = [&](std::uint64_t stride) { return ((call.rows - 1) * stride + call.columns) * 2; };
    const std::array<NativeUse, 3> uses{{{"x", call.x, bytes(x_stride)},
                                         {"residual", call.residual, bytes(residual_stride)},
                                         {"weight", call.weight, call.columns * std::uint64_t{2}}}};
    const auto work = [&](std::uint64_t native) {
      return translate(fi::add_rms_norm({.x = host_view<void>(call.x),
                                         .residual = host_view<void>(call.residual),
                                         .weight = host_view<void>(call.weight),
                                         .rows = call.rows,
                                         .columns = call.columns,
                                         .x_stride = static_cast<std::uint32_t>(x_stride),
                                         .residual_stride = static_cast<std::uint32_t>(residual_stride),
                                         .eps = call.eps,
                                         .bias_one = call.weight_plus_one,
                                         .stream = native}),
                       "add_rms_norm", site);
    };
    return backend_.enqueue_native("flashinfer.add_rms_norm", stream, uses, work, site);
  }

  Result<> prepare_sample(std::uint32_t rows, std::uint32_t vocabulary, StreamHandle stream, std::source_location site) override {
    const DevicePtr any{kDeviceAlignment};
    METRALE_TRY(check(SampleCall{.logits = any, .tokens = any, .rows = rows, .vocabulary = vocabulary}, site));
    METRALE_TRY(backend_.op_cache().scratch(kSampleTag, stream, SampleScratch(rows, vocabulary).bytes, site));
    return {};
  }

  Result<> sample(const SampleCall& call, StreamHandle stream, std::source_location site) override {
    METRALE_TRY(check(call, site));
    const SampleScratch scratch(call.rows, call.vocabulary);
    const DevicePtr memory = METRALE_TRY(backend_.op_cache().scratch(kSampleTag, stream, scratch.bytes, site));
    std::array<NativeUse, 8> uses{{{"logits", call.logits, std::uint64_t{call.rows} * call.vocabulary * 4},
                                   {"tokens", call.tokens, std::uint64_t{call.rows} * 4},
                                   {"scratch", memory, scratch.bytes}}};
    std::size_t num_uses = 3;
    const auto optional = [&](std::string_view what, DevicePtr ptr, std::uint64_t bytes) {
      if (ptr) uses[num_uses++] = {what, ptr, bytes};
    };
    optional("temperatures", call.temperatures, std::uint64_t{call.rows} * 4);
    optional("top_ks", call.top_ks, std::uint64_t{call.rows} * 4);
    optional("top_ps", call.top_ps, std::uint64_t{call.rows} * 4);
    optional("seed", call.seed_device, 8);
    optional("offset", call.offset_device, 8);
    const auto vocabulary = static_cast<std::int32_t>(call.vocabulary);
    const auto work = [&](std::uint64_t native) {
      return translate(fi::sample({.logits = host_view<float>(call.logits),
                                   .probabilities = host_view<float>(memory),
                                   .temperatures = host_view<float>(call.temperatures),
                                   .temperature = call.temperature,
                                   .top_ks = host_view<std::int32_t>(call.top_ks),
                                   .top_k = call.top_k == 0 ? vocabulary : std::min(call.top_k, vocabulary),
                                   .top_ps = host_view<float>(call.top_ps),
                                   .top_p = call.top_p,
                                   .tokens = host_view<std::int32_t>(call.tokens),
                                   .valid = host_view<bool>(memory.offset(scratch.valid)),
                                   .seed_device = host_view<std::uint64_t>(call.seed_device),
                                   .seed = call.seed,
                                   .offset_device = host_view<std::uint64_t>(call.offset_device),
                                   .offset = call.offset,
                                   .rows = call.rows,
                                   .vocabulary = call.vocabulary,
                                   .workspace = host_view<void>(memory.offset(scratch.workspace)),
                                   .workspace_bytes = scratch.workspace_bytes,
                                   .stream = native}),
                       "sample", site);
    };
    return backend_.enqueue_native("flashinfer.sample", stream, {uses.data(), num_uses}, work, site);
  }

 private:
  GpuBackend& backend_;
  fi::Device device_;
};

}  // namespace

BridgeStatus status() {
  const bool has_hopper = std::ranges::any_of(fi::prefill_instances(), [](const auto* instance) { return instance->hopper; });
  return {.library = "FlashInfer",
          .is_available = true,
          .text = fmt::format("headers of this build, heads of {}{}", head_dims(), has_hopper ? ", wgmma for sm_90a" : "")};
}

Result<> translate(const fi::Outcome& outcome, std::string_view what, std::source_location site) {
  if (outcome.ok()) return {};
  Errc code = Errc::internal;
  std::string advice = "FlashInfer refused what the bridge let pass";
  if (outcome.cuda == kMemoryAllocation) {
    code = Errc::out_of_memory;
    advice = "out of memory";
  } else if (outcome.cuda == kNotSupported || outcome.cuda == kNoKernelImage || outcome.cuda == kInvalidDeviceFunction) {
    code = Errc::unsupported;
    advice = "this build has no code for the device; see METRALE_CUDA_TARGETS";
  } else if (outcome.cuda != 0) {
    advice = "a launch failed";
  }
  Error error(code, fmt::format("flashinfer: {}: {}", what, advice), site);
  return std::move(error).with_native(outcome.cuda, outcome.text);
}

Result<std::unique_ptr<Bridge>> Bridge::create(GpuBackend& backend, std::source_location site) {
  if (!backend.capabilities().has(Capability::native_work)) {
    return Error(Errc::unsupported,
                 fmt::format("flashinfer: backend {}: {}", backend.name(), backend.capabilities().why_not(Capability::native_work)),
                 site);
  }
  fi::Device device;
  const auto work = [&](std::uint64_t) { return translate(fi::probe(device), "opening", site); };
  METRALE_TRY(backend.enqueue_native("flashinfer.probe", backend.default_stream(), {}, work, site));
  return std::make_unique<BridgeOf>(backend, device);
}

}  // namespace metrale::flashinfer
