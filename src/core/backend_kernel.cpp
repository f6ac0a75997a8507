// SPDX-License-Identifier: Apache-2.0
//
// GpuBackend: kernels, their audit, launches.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <new>

#include <fmt/format.h>

#include "core/face_state.h"

namespace metrale {

using detail::FaceState;
using detail::KernelRecord;
using detail::StreamRecord;

namespace {

constexpr float kMaxE4m3 = 448.0F;

/// Passes a backend's registry on and makes its globals known to copies.
class LedgeredRegistry final : public KernelRegistry {
 public:
  LedgeredRegistry(FaceState& face, KernelRegistry& inner) : face_(face), inner_(inner) {}

  Result<std::vector<Entry>> entries() const override { return inner_.entries(); }
  LoadReport load_report() const override { return inner_.load_report(); }

  Result<DeviceSymbol> device_symbol(std::string_view module, std::string_view name, std::source_location site) override {
    OpRecord op{.op = Op::device_symbol, .site = site};
    return face_.run(op, [&]() -> Result<DeviceSymbol> {
      const DeviceSymbol symbol = METRALE_TRY(inner_.device_symbol(module, name, site));
      std::lock_guard lock(face_.alias_mutex);
      if (!face_.device.find(symbol.ptr)) face_.device.add(symbol.ptr, symbol.bytes, MemoryKind::module_symbol, site);
      return symbol;
    });
  }

 private:
  FaceState& face_;
  KernelRegistry& inner_;
};

std::string geometry(Dim3 d) { return fmt::format("({}, {}, {})", d.x, d.y, d.z); }

/// Keeps the first arguments for observers.
void note_args(OpRecord& op, std::span<const KernelArg> args) noexcept {
  for (std::size_t i = 0; i < std::min(args.size(), kRecordedArgs); ++i) {
    op.args[i] = args[i].leading_word();
    if (args[i].is_buffer()) op.buffer_mask |= 1u << i;
  }
}

std::string describe_args(std::span<const KernelArg> args, const FaceState& f) {
  std::string text;
  for (std::size_t i = 0; i < args.size(); ++i) {
    text += fmt::format("{}{}: ", i == 0 ? "" : ", ", i);
    text += args[i].is_buffer() ? f.describe_address(args[i].ptr()) : fmt::format("{} bytes", args[i].size_bytes());
  }
  return text;
}

/// The parameters of a raw launch: nothing tells which are addresses, so a word that falls in a known block is taken for one.
std::string describe_params(const KernelRecord& kernel, void* const* params, const FaceState& f) {
  std::string text;
  for (std::size_t i = 0; i < kernel.facts.param_bytes.size(); ++i) {
    const std::uint32_t bytes = kernel.facts.param_bytes[i];
    std::uint64_t word = 0;
    const bool is_word = params[i] != nullptr && bytes <= sizeof(word);
    if (is_word) std::memcpy(&word, params[i], bytes);
    text += fmt::format("{}{}: ", i == 0 ? "" : ", ", i);
    if (!is_word) {
      text += fmt::format("{} bytes", bytes);
    } else {
      text += bytes == sizeof(word) && f.device.find({word}) ? f.describe_address({word}) : fmt::format("{:#x}", word);
    }
  }
  return text;
}

/// What a failed launch notes.
std::string describe_launch(const KernelRecord& kernel, Dim3 grid, Dim3 block, std::uint32_t shared_bytes,
                            std::string_view arguments) {
  return fmt::format("kernel {}.{}, grid {}, block {}, {} bytes shared, arguments {}", kernel.module, kernel.function,
                     geometry(grid), geometry(block), shared_bytes, arguments);
}

/// Whether no dimension is zero and the threads are few enough not to be counted with care.
inline bool has_threads(Dim3 grid, Dim3 block) noexcept {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 21;  // three of them multiplied stay below 64 bits
  const auto is_some = [](std::uint32_t a, std::uint32_t b) { return std::uint64_t{a} * b - 1 < kMost - 1; };
  return is_some(grid.x, grid.y) && is_some(grid.z, block.z) && is_some(block.x, block.y);
}

Result<> check_geometry(const KernelRecord& kernel, Dim3 grid, Dim3 block, GpuBackend::Site site) {
  std::uint64_t blocks = 0;
  std::uint64_t threads = 0;
  std::uint64_t all = 0;
  const bool fits = !__builtin_mul_overflow(std::uint64_t{grid.x} * grid.y, grid.z, &blocks) &&
                    !__builtin_mul_overflow(std::uint64_t{block.x} * block.y, block.z, &threads) &&
                    !__builtin_mul_overflow(blocks, threads, &all);
  if (fits && all != 0) [[likely]]
    return {};
  return Error(Errc::invalid_argument,
               fmt::format("{}.{}: grid {} block {} has {}", kernel.module, kernel.function, geometry(grid), geometry(block),
                           fits ? "a zero dimension" : "more threads than 64 bits count"),
               site);
}

Result<> check_attributes(const FaceState& f, const KernelRecord& kernel, const LaunchAttributes& a, GpuBackend::Site site) {
  const auto need = [&](Capability c) -> Result<> {
    if (f.capabilities.has(c)) return {};
    return Error(Errc::unsupported, fmt::format("{}.{}: {}", kernel.module, kernel.function, f.capabilities.why_not(c)), site);
  };
  if (a.cluster != Dim3{0, 0, 0}) {
    METRALE_TRY(need(Capability::cluster_launch));
    if (a.cluster.x == 0 || a.cluster.y == 0 || a.cluster.z == 0) {
      return Error(Errc::invalid_argument,
                   fmt::format("{}.{}: cluster {} has a zero dimension", kernel.module, kernel.function, geometry(a.cluster)),
                   site);
    }
  }
  if (a.cooperative) METRALE_TRY(need(Capability::cooperative_launch));
  if (a.dependent_launch) {
    METRALE_TRY(need(Capability::dependent_launch));
    if (!kernel.facts.waits_for_dependency) {
      return Error(Errc::invalid_argument,
                   fmt::format("{}.{} does not publish that it waits for its predecessor; launch it without dependent_launch",
                               kernel.module, kernel.function),
                   site);
    }
  }
  return {};
}

/// Whether nothing but dependent launch is asked for, and the kernel may have that.
inline bool is_allowed(const KernelRecord& kernel, const LaunchAttributes& attributes) noexcept {
  return kernel.may_depend && !attributes.cooperative && attributes.cluster == Dim3{0, 0, 0};
}

/// Whether `check_args` has nothing against these.
inline bool is_signature(const KernelRecord& kernel, std::span<const KernelArg> args) noexcept {
  if (args.size() != kernel.num_plain_params) [[unlikely]]
    return false;
  const std::uint32_t* want = kernel.facts.param_bytes.data();
  for (const KernelArg& arg : args) {
    if (arg.size_bytes() != *want++) [[unlikely]]
      return false;
  }
  return true;
}

/// Compares typed arguments with the signature.
Result<> check_args(const KernelRecord& kernel, std::span<const KernelArg> args, GpuBackend::Site site) {
  const auto name = [&] { return fmt::format("{}.{}", kernel.module, kernel.function); };
  const std::vector<std::uint32_t>& want = kernel.facts.param_bytes;
  if (!kernel.facts.takes_any_arguments) {
    if (args.size() != want.size()) {
      return Error(Errc::invalid_argument, fmt::format("{} takes {} arguments, {} were given", name(), want.size(), args.size()),
                   site);
    }
    for (std::size_t i = 0; i < args.size(); ++i) {
      if (args[i].size_bytes() != want[i]) {
        return Error(Errc::invalid_argument,
                     fmt::format("{}: argument {} is {} bytes, the kernel takes {}", name(), i, args[i].size_bytes(), want[i]),
                     site);
      }
    }
    if (kernel.param_bytes_total <= kMaxKernelArgBytes && args.size() <= kMaxKernelArgs) return {};
  }
  std::uint64_t total = 0;
  for (const KernelArg& arg : args) total += arg.size_bytes();
  if (total > kMaxKernelArgBytes || args.size() > kMaxKernelArgs) {
    return Error(Errc::invalid_argument,
                 fmt::format("{}: {} arguments of {} bytes; at most {} and {} bytes are allowed", name(), args.size(), total,
                             kMaxKernelArgs, kMaxKernelArgBytes),
                 site);
  }
  return {};
}

}  // namespace

Result<KernelHandle> GpuBackend::kernel(std::string_view module, std::string_view function, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::kernel, .site = site};
  return f.run(op, [&]() -> Result<KernelHandle> {
    auto native = do_find_kernel(module, function);
    if (!native) {
      if (native.error().code() != Errc::not_found) return Error(std::move(native).error());
      std::lock_guard lock(f.audit_mutex);
      auto miss = std::find_if(f.audit.misses.begin(), f.audit.misses.end(),
                               [&](const LookupMiss& m) { return m.module == module && m.function == function; });
      if (miss == f.audit.misses.end()) {
        const bool declared = std::any_of(f.declared_absent.begin(), f.declared_absent.end(),
                                          [&](const auto& d) { return d.first == module && d.second == function; });
        f.audit.misses.push_back({std::string(module), std::string(function), site, 0, declared});
        miss = std::prev(f.audit.misses.end());
      }
      ++miss->count;
      if (f.audit.sealed && !miss->declared_absent) {
        return Error(
            Errc::internal,
            fmt::format("kernel {}.{} is missing, and the audit was sealed: {}", module, function, native.error().message()), site);
      }
      return Error(std::move(native).error());
    }
    {
      std::lock_guard lock(f.audit_mutex);
      ++f.audit.num_hits;
    }
    const auto known = [&]() -> KernelHandle {  // kernels_mutex is held
      const auto functions = f.kernels_by_name.find(module);
      if (functions == f.kernels_by_name.end()) return {};
      const auto handle = functions->second.find(function);
      return handle == functions->second.end() ? KernelHandle{} : handle->second;
    };
    {
      std::lock_guard lock(f.kernels_mutex);
      op.kernel = known();
    }
    if (op.kernel) return op.kernel;
    KernelFacts facts = METRALE_TRY(do_kernel_facts(*native));
    std::lock_guard lock(f.kernels_mutex);
    op.kernel = known();
    if (op.kernel) return op.kernel;  // another thread was first
    const std::uint64_t value = f.kernels.insert([&](KernelRecord& record, std::uint64_t) {
      record.native = *native;
      record.facts = std::move(facts);
      record.param_bytes_total = 0;
      for (const std::uint32_t bytes : record.facts.param_bytes) record.param_bytes_total += bytes;
      const bool is_plain = !f.debug_sync_kernels && !f.refused_ops[static_cast<std::size_t>(Op::launch)] &&
                            !record.facts.takes_any_arguments && record.param_bytes_total <= kMaxKernelArgBytes &&
                            record.facts.param_bytes.size() <= kMaxKernelArgs;
      record.num_plain_params = is_plain ? record.facts.param_bytes.size() : SIZE_MAX;
      record.may_depend = record.facts.waits_for_dependency && f.capabilities.has(Capability::dependent_launch);
      record.module = module;
      record.function = function;
    });
    if (value == 0) return Error(Errc::internal, "no kernel handle is left", site);
    op.kernel = {value};
    f.kernels_by_name[std::string(module)].emplace(function, op.kernel);
    return op.kernel;
  });
}

Result<bool> GpuBackend::has_module(std::string_view module, Site site) {
  return face_->run({.op = Op::has_module, .site = site}, [&] { return do_has_module(module); });
}

// Nearly every launch takes this way alone, which is kept short: behind a driver each line of our code has to be fetched anew, and
// displaces one of the driver's. What is turned down here is checked once more where there are words for it.
Result<> GpuBackend::launch_typed(KernelHandle kernel, Dim3 grid, Dim3 block, std::uint32_t shared_bytes, StreamHandle stream,
                                  std::span<const KernelArg> args, const LaunchAttributes& attributes, Site site) {
  FaceState& f = *face_;
  FlightRecorder* const recorder = f.recorder.get();
  const KernelRecord* k = f.kernels.find(kernel.value);
  StreamRecord* s = f.streams.find(stream.value);
  if (!f.usable() || k == nullptr || s == nullptr || s->capture.load(std::memory_order_acquire) != 0 || !has_threads(grid, block) ||
      !is_signature(*k, args) || (attributes.any() && !is_allowed(*k, attributes))) [[unlikely]]
    return f.launch_checked({kernel, grid, block, shared_bytes, stream, args, attributes, site});
  return [&] {
    const std::uint64_t place = recorder == nullptr ? 0 : recorder->claim();
    Result<> launched = FaceState::caught(
        Op::launch, site, [&] { return do_launch({k->native, grid, block, shared_bytes, s->native, args, nullptr, &attributes}); });
    // A capture or an observer may have come meanwhile.
    if (!launched || s->capture.load(std::memory_order_acquire) != 0 || f.has_observers.load(std::memory_order_relaxed))
        [[unlikely]] {
      launched = f.finish_launch({kernel, grid, block, shared_bytes, stream, args, attributes, site}, k, s, std::move(launched),
                                 detail::Recording::of(recorder, place));
    } else if (recorder != nullptr) [[likely]] {
      recorder->fill_launch(place, FaceState::cheap_now(), stream, site, kernel, grid, block, shared_bytes, args);
    }
    return launched;
  }();
}

Result<> FaceState::launch_checked(const LaunchCall& call) {
  if (!usable()) return hooks.health(call.site);
  KernelRecord* k = nullptr;
  StreamRecord* s = nullptr;
  Recording recording;
  Result<> launched = caught(Op::launch, call.site, [&]() -> Result<> {
    if (refused_ops[static_cast<std::size_t>(Op::launch)]) return unsupported(Op::launch, call.site);
    k = METRALE_TRY(kernel(call.kernel, call.site));
    StreamRecord* on = METRALE_TRY(stream_for_work(Op::launch, call.stream, call.site));
    METRALE_TRY(check_geometry(*k, call.grid, call.block, call.site));
    METRALE_TRY(check_args(*k, call.args, call.site));
    METRALE_TRY(check_attributes(*this, *k, call.attributes, call.site));
    s = on;
    recording = claim_place();
    METRALE_TRY(
        hooks.do_launch({k->native, call.grid, call.block, call.shared_bytes, s->native, call.args, nullptr, &call.attributes}));
    if (debug_sync_kernels && s->capture.load(std::memory_order_acquire) == 0) return hooks.do_synchronize(s->native);
    return {};
  });
  return finish_launch(call, k, s, std::move(launched), recording);
}

Result<> FaceState::finish_launch(const LaunchCall& call, const KernelRecord* kernel, StreamRecord* stream, Result<> launched,
                                  Recording recording) {
  OpRecord op{.op = Op::launch,
              .num_args = static_cast<std::uint32_t>(call.args.size()),
              .stream = call.stream,
              .site = call.site,
              .kernel = call.kernel,
              .grid = call.grid,
              .block = call.block,
              .shared_bytes = call.shared_bytes};
  note_args(op, call.args);
  fill_place(recording, op, launched);
  Result<> finished = caught(Op::launch, call.site, [&]() -> Result<> {
    if (!launched && stream == nullptr) return std::move(launched);
    if (!launched) {
      return Error(std::move(launched).error())
          .with_note(describe_launch(*kernel, call.grid, call.block, call.shared_bytes, describe_args(call.args, *this)));
    }
    if (stream->capture.load(std::memory_order_acquire) == 0) return {};
    for (const KernelArg& arg : call.args) {
      if (arg.is_buffer()) name_device(*stream, arg.ptr());
    }
    return {};
  });
  if (finished && !has_observers.load(std::memory_order_relaxed)) return finished;
  return conclude(std::move(finished), op, recording, call.args);
}

Result<> GpuBackend::launch(KernelHandle kernel, Dim3 grid, Dim3 block, std::uint32_t shared_bytes, StreamHandle stream,
                            void** params, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::launch_raw,
              .stream = stream,
              .site = site,
              .kernel = kernel,
              .grid = grid,
              .block = block,
              .shared_bytes = shared_bytes};
  return f.run(op, [&]() -> Result<> {
    KernelRecord* k = METRALE_TRY(f.kernel(kernel, site));
    StreamRecord* s = METRALE_TRY(f.stream_for_work(op.op, stream, site));
    METRALE_TRY(check_geometry(*k, grid, block, site));
    if (params == nullptr && !k->facts.param_bytes.empty()) {
      return Error(Errc::invalid_argument, fmt::format("{}.{}: params is null", k->module, k->function), site);
    }
    const LaunchAttributes none;
    const LaunchDesc launch{k->native, grid, block, shared_bytes, s->native, {}, params, &none};
    Result<> launched = do_launch(launch);
    if (launched && f.debug_sync_kernels && s->capture.load(std::memory_order_acquire) == 0) launched = do_synchronize(s->native);
    if (launched) [[likely]]
      return {};
    return Error(std::move(launched).error())
        .with_note(describe_launch(*k, grid, block, shared_bytes, describe_params(*k, params, f)));
  });
}

Result<const KernelFacts*> GpuBackend::kernel_facts(KernelHandle kernel, Site site) const {
  return FaceState::caught("kernel_facts", site, [&]() -> Result<const KernelFacts*> {
    METRALE_TRY(health(site));
    KernelRecord* record = METRALE_TRY(face_->kernel(kernel, site));
    return &record->facts;
  });
}

std::string GpuBackend::kernel_name(KernelHandle kernel) const {
  const KernelRecord* record = face_->kernels.find(kernel.value);
  return record == nullptr ? fmt::format("kernel {:#x}", kernel.value) : record->module + "." + record->function;
}

Result<std::uint32_t> GpuBackend::kernel_n_tile(KernelHandle kernel, Site site) const {
  return FaceState::caught("kernel_n_tile", site, [&]() -> Result<std::uint32_t> {
    METRALE_TRY(health(site));
    KernelRecord* record = METRALE_TRY(face_->kernel(kernel, site));
    if (record->facts.n_tile.value_or(0) == 0) {
      return Error(Errc::not_found, fmt::format("{}.{} publishes no {}_n_tile", record->module, record->function, record->function),
                   site);
    }
    return *record->facts.n_tile;
  });
}

Result<bool> GpuBackend::kernel_casts_a_to_e4m3(KernelHandle kernel, Site site) const {
  return FaceState::caught("kernel_casts_a_to_e4m3", site, [&]() -> Result<bool> {
    METRALE_TRY(health(site));
    KernelRecord* record = METRALE_TRY(face_->kernel(kernel, site));
    return record->facts.casts_a_to_e4m3;
  });
}

Result<> GpuBackend::check_e4m3_range(DevicePtr ptr, std::uint64_t n, StreamHandle stream, Site site) {
  return FaceState::caught("check_e4m3_range", site, [&]() -> Result<> {
    METRALE_TRY(health(site));
    constexpr std::uint64_t kChunk = 64 * 1024;
    std::vector<std::uint16_t> values(std::min(n, kChunk));
    for (std::uint64_t done = 0; done < n; done += kChunk) {
      const std::span<std::uint16_t> part(values.data(), std::min(kChunk, n - done));
      METRALE_TRY(copy_d2h_on_stream(std::as_writable_bytes(part), ptr.offset(2 * done), stream, site));
      for (std::size_t i = 0; i < part.size(); ++i) {
        const float value = std::bit_cast<float>(std::uint32_t{part[i]} << 16);
        if (std::isfinite(value) && std::fabs(value) <= kMaxE4m3) continue;
        return Error(Errc::out_of_range,
                     fmt::format("element {} is {}: beyond ±{} an E4M3 operand saturates", done + i, value, kMaxE4m3), site);
      }
    }
    return {};
  });
}

KernelRegistry* GpuBackend::kernel_registry() noexcept {
  FaceState& f = *face_;
  if (f.in_forked_child()) return nullptr;
  std::lock_guard lock(f.audit_mutex);
  KernelRegistry* inner = f.registry ? nullptr : do_kernel_registry();
  if (inner != nullptr) f.registry.reset(new (std::nothrow) LedgeredRegistry(f, *inner));
  return f.registry.get();
}

Result<> GpuBackend::unload_modules(Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::unload_modules, .site = site};
  return f.run(op, [&]() -> Result<> {
    METRALE_TRY(f.guard_device(op.op, site));
    METRALE_TRY(do_unload_modules());
    {
      std::lock_guard lock(f.kernels_mutex);
      f.kernels_by_name.clear();
      for (const std::uint64_t handle : f.kernels.handles()) f.kernels.erase(handle);
    }
    f.op_cache->forget_kernels();
    for (const Allocation& block : f.device.snapshot()) {
      if (block.kind != MemoryKind::module_symbol) continue;
      f.device.take(block.base, kind_bit(MemoryKind::module_symbol), AllocLedger::Named::goes);
    }
    return {};
  });
}

KernelAudit GpuBackend::kernel_audit() const {
  if (in_forked_child()) return {};
  std::lock_guard lock(face_->audit_mutex);
  return face_->audit;
}

void GpuBackend::declare_absent(std::string_view module, std::string_view function) {
  std::lock_guard lock(face_->audit_mutex);
  face_->declared_absent.emplace_back(module, function);
  for (LookupMiss& miss : face_->audit.misses) {
    if (miss.module == module && miss.function == function) miss.declared_absent = true;
  }
}

void GpuBackend::seal_audit() {
  std::lock_guard lock(face_->audit_mutex);
  face_->audit.sealed = true;
}

}  // namespace metrale
