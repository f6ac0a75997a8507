// SPDX-License-Identifier: Apache-2.0
#include "models/decoder/ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "metrale/op_cache.h"

namespace metrale::models {
namespace {

KernelArg to_arg(const DevicePtr& ptr) { return KernelArg::buffer(ptr); }
/// The struct is read during the launch call.
template <class T>
  requires(!std::is_same_v<T, DevicePtr>)
KernelArg to_arg(const T& params) {
  return KernelArg::bytes(std::as_bytes(std::span<const T, 1>(&params, 1)));
}

LinearMatrix describe(const Matrix& weight) {
  return {.n = weight.n, .dtype = static_cast<std::uint32_t>(weight.dtype), .packed = weight.packed, .ld_y = weight.n};
}

}  // namespace

Result<Ops> Ops::create(GpuBackend& backend, StreamHandle stream, const OpsOptions& options) {
  Ops ops(backend, stream, options, METRALE_TRY(launch_plans(backend)));
  ops.dependent_launch_ = options.dependent_launch && backend.capabilities().has(Capability::dependent_launch);
  Kernels& k = ops.kernels_;
  struct Wanted {
    Kernel& kernel;
    std::string_view module;
    std::string_view function;
    std::uint32_t* tile = nullptr;
  };
  const Wanted wanted[] = {
      {k.repack, kMatmulModule, "repack"},
      {k.gather, kMatmulModule, "gather"},
      {k.prepare, kMatmulModule, "prepare"},
      {k.linear, kMatmulModule, "linear"},
      {k.linear4, kMatmulModule, "linear4"},
      {k.swiglu, kMatmulModule, "swiglu"},
      {k.widen, kDecoderModule, "widen"},
      {k.rotary, kDecoderModule, "rotary"},
      {k.rotate_store, kDecoderModule, "rotate_store"},
      {k.attend, kDecoderModule, "attend", &k.attend_tile},
      {k.attend_one, kDecoderModule, "attend_one"},
      {k.conv, kDecoderModule, "conv", &k.conv_tile},
      {k.delta, kDecoderModule, "delta"},
      {k.argmax, kDecoderModule, "argmax"},
      {k.score, kDecoderModule, "score"},
      {k.sample, kSamplingModule, "sample"},
      {k.advance, kSamplingModule, "advance"},
  };
  const auto find = [&](std::string_view module, std::string_view function) -> Result<Kernel> {
    const OpCache::Kernel found = METRALE_TRY(backend.op_cache().kernel(module, function));
    return Kernel{found.handle, found.facts != nullptr && found.facts->waits_for_dependency};
  };
  if (ops.plans_->has_rotate_attend()) k.rotate_attend = METRALE_TRY(find(kDecoderModule, "rotate_attend"));
  for (const Wanted& w : wanted) {
    w.kernel = METRALE_TRY(find(w.module, w.function));
    if (!w.tile) continue;
    const Result<std::uint32_t> tile = backend.kernel_n_tile(w.kernel.handle);
    if (!tile && tile.error().code() == Errc::not_found && !backend.capabilities().has(Capability::computes)) {
      return Error(Errc::unsupported,
                   fmt::format("the {} backend computes nothing, so no model runs on it; take one that does, such "
                               "as host",
                               backend.name()))
          .with_note(tile.error().message());
    }
    *w.tile = METRALE_TRY(tile);
  }
  for (const std::string_view entry : ops.plans_->matmul_entries())
    k.matmul_entries.push_back(METRALE_TRY(find(kMatmulModule, entry)));
  return ops;
}

template <class... Args>
Result<> Ops::launch(const Kernel& kernel, const LaunchShape& shape, const Args&... args) {
  const std::array<KernelArg, sizeof...(Args)> packed{to_arg(args)...};
  LaunchAttributes attributes;
  attributes.cluster = shape.cluster;
  attributes.cooperative = shape.cooperative;
  // Only behind a kernel: a copy or a fill does not let what follows it start early.
  attributes.dependent_launch = dependent_launch_ && after_kernel_ && kernel.waits;
  METRALE_TRY(backend_->launch_typed(kernel.handle, shape.grid, shape.block, shape.shared_bytes, stream_, packed, attributes));
  after_kernel_ = true;
  return {};
}

template <class... Args>
Result<> Ops::launch_matmul(const Kernel& kernel, const LaunchShape& shape, const Args&... args) {
  return launch(shape.entry < 0 ? kernel : kernels_.matmul_entries[static_cast<std::size_t>(shape.entry)], shape, args...);
}

Result<> Ops::copy_h2d(DevicePtr to, std::span<const std::byte> from) {
  after_kernel_ = false;
  return backend_->copy_h2d_async(to, from, stream_);
}

Result<> Ops::copy_h2d_retained(DevicePtr to, std::span<const std::byte> from) {
  after_kernel_ = false;
  return backend_->copy_h2d_async_retained(to, from, stream_);
}

Result<> Ops::copy_d2h(std::span<std::byte> to, DevicePtr from) {
  after_kernel_ = false;
  return backend_->copy_d2h_async(to, from, stream_);
}

Result<> Ops::clear(DevicePtr to, std::uint64_t bytes) {
  after_kernel_ = false;
  return backend_->memset_async(to, 0, bytes, stream_);
}

Result<> Ops::all_reduce(Communicator& ranks, DevicePtr values, std::uint64_t count) {
  after_kernel_ = false;
  return ranks.all_reduce(values, values, count, DType::f32, stream_);
}

Result<> Ops::repack(Matrix& weight) {
  if (!plans_->can_repack(weight.dtype, weight.k)) return {};
  const RepackParams params{weight.n, weight.k, static_cast<std::uint32_t>(weight.dtype)};
  METRALE_TRY(launch(kernels_.repack, plans_->repack(weight.dtype, weight.n, weight.k), weight.ptr, params));
  weight.packed = true;
  return {};
}

Result<> Ops::gather(DevicePtr ids, const Matrix& weight, std::uint32_t m, DevicePtr y) {
  const GatherParams params{.m = m,
                            .n = weight.n,
                            .k = weight.k,
                            .dtype = static_cast<std::uint32_t>(weight.dtype),
                            .packed = weight.packed,
                            .ld_y = weight.k};
  return launch(kernels_.gather, plans_->gather(m), ids, weight.ptr, y, params);
}

Result<LinearParams> Ops::begin(const Rows& rows, DType weights, DevicePtr& x, DevicePtr& norm) {
  LinearParams params;
  params.m = rows.m;
  params.k = rows.k;
  params.ld_x = rows.k;
  params.precision = static_cast<std::uint32_t>(precision_);
  params.norm_dtype = static_cast<std::uint32_t>(DType::f32);
  params.norm_eps = rows.norm_eps;
  x = rows.x;
  norm = rows.norm;
  if (rows.m <= plans_->max_unprepared_rows()) return params;
  params.w[0].dtype = static_cast<std::uint32_t>(weights);
  METRALE_TRY(launch(kernels_.prepare, plans_->prepare(rows.m, rows.k), rows.x, rows.norm, prepared_, params));
  params.prepared = 1;
  x = prepared_;
  norm = {};
  return params;
}

Result<> Ops::linear(const Rows& rows, std::span<const Product> products) {
  const int first = plans_->activation_class(products[0].weight->dtype, precision_);
  for (const Product& product : products) {
    if (plans_->activation_class(product.weight->dtype, precision_) == first) continue;
    for (const Product& each : products) METRALE_TRY(linear_same_class(rows, {&each, 1}));
    return {};
  }
  // Where there are entries for one row and one type, two of those are quicker than one launch of the general kernel.
  if (rows.m != 1 || plans_->matmul_entries().empty()) return linear_same_class(rows, products);
  for (std::size_t begin = 0, end = 0; begin < products.size(); begin = end) {
    while (end < products.size() && products[end].weight->dtype == products[begin].weight->dtype) ++end;
    METRALE_TRY(linear_same_class(rows, products.subspan(begin, end - begin)));
  }
  return {};
}

Result<> Ops::linear_same_class(const Rows& rows, std::span<const Product> products) {
  DevicePtr x, norm;
  LinearParams params = METRALE_TRY(begin(rows, products[0].weight->dtype, x, norm));
  for (std::size_t i = 0; i < products.size(); ++i) params.w[i] = describe(*products[i].weight);
  if (products.size() == 1) {
    const Product& p = products[0];
    return launch_matmul(kernels_.linear, plans_->linear("linear", params), x, norm, p.weight->ptr, p.bias, p.residual, p.y,
                         params);
  }
  std::array<DevicePtr, kMaxLinearMatrices> w, bias, y;
  for (std::size_t i = 0; i < products.size(); ++i) {
    w[i] = products[i].weight->ptr;
    bias[i] = products[i].bias;
    y[i] = products[i].y;
  }
  return launch_matmul(kernels_.linear4, plans_->linear("linear4", params), x, norm, w[0], w[1], w[2], w[3], bias[0], bias[1],
                       bias[2], bias[3], y[0], y[1], y[2], y[3], params);
}

Result<> Ops::swiglu(const Rows& rows, const Matrix& gate, const Matrix& up, DevicePtr y) {
  if (plans_->activation_class(gate.dtype, precision_) != plans_->activation_class(up.dtype, precision_)) {
    return Error(Errc::unsupported, fmt::format("gate is {} and up is {}: they cannot be multiplied together",
                                                to_string(gate.dtype), to_string(up.dtype)));
  }
  DevicePtr x, norm;
  LinearParams params = METRALE_TRY(begin(rows, gate.dtype, x, norm));
  params.w[0] = describe(gate);
  params.w[1] = describe(up);
  return launch_matmul(kernels_.swiglu, plans_->linear("swiglu", params), x, norm, gate.ptr, up.ptr, y, params);
}

Result<> Ops::widen(DevicePtr from, DevicePtr to, const WidenParams& params) {
  return launch(kernels_.widen, plans_->widen(std::uint64_t{params.rows} * params.cols), from, to, params);
}

Result<> Ops::rotary(DevicePtr step, DevicePtr inverse_frequencies, DevicePtr table, const RotaryParams& params) {
  return launch(kernels_.rotary, plans_->rotary(params), step, inverse_frequencies, table, params);
}

Result<> Ops::rotate_store(const RotateStore& t, const Cache& cache, const RotateStoreParams& params) {
  return launch(kernels_.rotate_store, plans_->rotate_store(params), t.q, t.k, t.v, t.q_norm, t.k_norm, t.rotary, cache.step,
                cache.block_table, cache.keys, cache.values, params);
}

Result<> Ops::rotate_attend(const RotateStore& t, const Cache& cache, DevicePtr scratch, DevicePtr out,
                            const RotateAttendParams& params) {
  return launch(kernels_.rotate_attend, plans_->rotate_attend(params), t.q, t.k, t.v, t.q_norm, t.k_norm, t.rotary, cache.step,
                cache.block_table, cache.keys, cache.values, out, scratch, params);
}

Result<> Ops::attend(DevicePtr q, const Cache& cache, DevicePtr out, const AttendParams& params) {
  const bool one = params.m == 1;
  const LaunchShape shape = one ? plans_->attend_one(params) : plans_->attend(params, kernels_.attend_tile);
  return launch(one ? kernels_.attend_one : kernels_.attend, shape, q, cache.keys, cache.values, cache.step, cache.block_table, out,
                params);
}

Result<> Ops::find_layers(const ModelConfig& config) {
  const std::optional<LayersPlan> plan = plans_->layers(config);
  if (!plan || !backend_->capabilities().has(Capability::cooperative_launch)) return {};
  // Asked of the registry, where its absence is no failed look-up: the module may have been built for other models.
  KernelRegistry* const registry = backend_->kernel_registry();
  if (registry == nullptr) return {};
  const auto entries = METRALE_TRY(registry->entries());
  if (std::ranges::none_of(entries, [&](const auto& e) { return e.module == kLayersModule && e.function == plan->entry; }))
    return {};
  const OpCache::Kernel found = METRALE_TRY(backend_->op_cache().kernel(kLayersModule, plan->entry));
  kernels_.layers = {found.handle, found.facts != nullptr && found.facts->waits_for_dependency};
  layers_plan_ = plan;
  return {};
}

Result<> Ops::layers(const Layers& t, const LayersParams& params) {
  return launch(kernels_.layers, layers_plan_->shape, t.table, t.embedding, t.ids, t.inverse_frequencies, t.step, t.block_table,
                t.exchange, t.hidden, params);
}

Result<> Ops::conv(DevicePtr x, DevicePtr weight, DevicePtr state, DevicePtr step, const ConvParams& params) {
  return launch(kernels_.conv, plans_->conv(params, kernels_.conv_tile), x, weight, state, step, params);
}

Result<> Ops::delta(const Delta& t, const DeltaParams& params) {
  return launch(kernels_.delta, plans_->delta(params), t.qkv, t.z, t.a, t.b, t.decay, t.dt_bias, t.norm, t.state, t.step, t.out,
                params);
}

Result<> Ops::argmax(DevicePtr logits, DevicePtr ids, const RowsParams& params) {
  return launch(kernels_.argmax, plans_->rows(params), logits, ids, params);
}

Result<> Ops::sample(DevicePtr logits, DevicePtr inputs, DevicePtr token, DevicePtr scratch, const SampleParams& params) {
  return launch(kernels_.sample, plans_->sample(), logits, inputs, token, scratch, params);
}

Result<> Ops::advance(DevicePtr token, DevicePtr step, DevicePtr ids, DevicePtr tokens, const AdvanceParams& params) {
  return launch(kernels_.advance, {}, token, step, ids, tokens, params);
}

Result<> Ops::score(DevicePtr logits, DevicePtr targets, DevicePtr scores, const RowsParams& params) {
  return launch(kernels_.score, plans_->rows(params), logits, targets, scores, params);
}

}  // namespace metrale::models
