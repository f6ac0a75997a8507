// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/module.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <mutex>
#include <new>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "backends/cuda/driver_log.h"
#include "backends/cuda/image.h"
#include "backends/cuda/outside_capture.h"
#include "backends/cuda/status.h"
#include "metrale/log.h"

namespace metrale::cuda {
namespace {

using Clock = std::chrono::steady_clock;

std::uint64_t ns_since(Clock::time_point start) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
}

// More parameters than a launch can carry: where a driver would never say that there are no more.
constexpr std::size_t kMaxParams = 4096;

/// Makes a context current for a block, and what was current before afterwards.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, CUcontext wanted) : driver_(driver), wanted_(wanted) {}
  Result<> enter() {
    METRALE_TRY(check(driver_, driver_.cuCtxGetCurrent_(&before_), "cuCtxGetCurrent"));
    if (before_ == wanted_) return {};
    METRALE_TRY(check(driver_, driver_.cuCtxSetCurrent_(wanted_), "cuCtxSetCurrent"));
    changed_ = true;
    return {};
  }
  ~CurrentContext() {
    if (changed_) static_cast<void>(driver_.cuCtxSetCurrent_(before_));
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
  const CUcontext wanted_;
  CUcontext before_ = nullptr;
  bool changed_ = false;
};

/// Exceptions stay inside: the only ones thrown here are of memory.
template <class Body>
auto guarded(Body&& body) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (...) {
    return Error::no_memory();
  }
}

}  // namespace

Modules::~Modules() { static_cast<void>(unload()); }

// ---- loading ----

Result<> Modules::load(std::span<const ModuleImage> images, bool warm) {
  return guarded([&]() -> Result<> {
    METRALE_TRY(check(driver_, driver_.cuCtxGetCurrent_(&context_), "cuCtxGetCurrent"));
    const auto attribute = [&](CUdevice_attribute which) -> Result<int> {
      int value = 0;
      METRALE_TRY(check(driver_, driver_.cuDeviceGetAttribute_(&value, which, device_), "cuDeviceGetAttribute"));
      return value;
    };
    major_ = METRALE_TRY(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
    minor_ = METRALE_TRY(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
    max_shared_bytes_ =
        static_cast<std::uint32_t>(std::max(0, METRALE_TRY(attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN))));
    warm_ = warm;
    for (const ModuleImage& image : images) sources_[std::string(image.name)] = {image.image, "built in"};
    if (!kernel_path_.empty()) {
      files_ = METRALE_TRY(read_kernel_path(kernel_path_));
      for (const KernelFile& file : files_) {
        const bool replaces = sources_.contains(file.name);
        sources_[file.name] = {file.bytes, file.path};
        log(LogLevel::info,
            fmt::format("METRALE_KERNEL_PATH: {} {} module {}", file.path, replaces ? "replaces" : "adds", file.name));
      }
    }
    std::unique_lock lock(mutex_);
    return load_all();
  });
}

Result<> Modules::load_all() {
  // All are looked at before any is loaded, so a module for another device costs nothing.
  for (const auto& [name, source] : sources_) {
    const auto codes = codes_of(source.image);
    if (!codes || std::any_of(codes->begin(), codes->end(), [&](const ImageCode& c) { return runs_on(c, major_, minor_); }))
      continue;
    return Error(
        Errc::bad_format,
        fmt::format("kernel module {} ({}) has code for {}, and this device is sm_{}{}; build with METRALE_CUDA_TARGETS that "
                    "name it, or put a module for it into METRALE_KERNEL_PATH",
                    name, source.origin, describe(*codes), major_, minor_));
  }
  for (const auto& [name, source] : sources_) {
    if (auto loaded = load_module(name, source); !loaded) {
      static_cast<void>(drop_all());
      return std::move(loaded).error().with_note(fmt::format("while loading kernel module {} ({})", name, source.origin));
    }
  }
  is_loaded_ = true;
  return {};
}

Result<> Modules::load_module(const std::string& name, const Source& source) {
  const auto start = Clock::now();
  // In the map first, so that whatever follows, the handle has an owner.
  Loaded& loaded = loaded_[name];
  loaded.report = {.name = name, .source = source.origin, .size_bytes = source.image.size()};
  loaded.handle = METRALE_TRY(load_image(name, source));
  METRALE_TRY(add_kernels(name, loaded.handle, loaded.report.num_kernels));
  loaded.report.load_ns = ns_since(start);
  if (!warm_) return {};
  const auto warm_start = Clock::now();
  for (auto it = kernels_.lower_bound({name, ""}); it != kernels_.end() && it->first.first == name; ++it) {
    METRALE_TRY(load_code(*it->second));
  }
  loaded.report.warm_ns = ns_since(warm_start);
  return {};
}

Result<CUmodule> Modules::load_image(const std::string& name, const Source& source) {
  const auto codes = codes_of(source.image);
  // The compiler's words are asked for only where it has something to compile: nothing promises that a module whose code is loaded
  // later leaves the buffer alone.
  const bool is_compiled = codes && std::none_of(codes->begin(), codes->end(), [&](const ImageCode& code) {
                             return !code.is_ptx && runs_on(code, major_, minor_);
                           });
  std::array<char, 8192> words{};
  std::array<CUjit_option, 3> options{CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_GENERATE_LINE_INFO};
  // The driver reads each value from the pointer's own bits.
  std::array<void*, 3> values{words.data(), reinterpret_cast<void*>(words.size() - 1), reinterpret_cast<void*>(std::uintptr_t{1})};
  std::string text;
  const void* image = source.image.data();
  if (is_ptx(source.image)) {
    text.assign(reinterpret_cast<const char*>(source.image.data()), source.image.size());
    image = text.c_str();
  }
  CUmodule handle = nullptr;
  const CUresult code = driver_.cuModuleLoadDataEx_(&handle, image, is_compiled ? options.size() : 0,
                                                    is_compiled ? options.data() : nullptr, is_compiled ? values.data() : nullptr);
  if (code == CUDA_SUCCESS) return handle;
  Error error = driver_error(driver_, code, "cuModuleLoadDataEx");
  std::string message = fmt::format(
      "kernel module {} ({}, {} bytes, {}) does not load on this sm_{}{} device: {}", name, source.origin, source.image.size(),
      codes ? "code for " + describe(*codes) : std::string("of no known format"), major_, minor_, error.message());
  std::string said(words.data());
  std::replace(said.begin(), said.end(), '\n', ' ');
  if (!said.empty()) message += "; the compiler says: " + said;
  return Error(error.code(), std::move(message)).with_native(error.native_code(), error.native_text());
}

Result<> Modules::add_kernels(const std::string& name, CUmodule handle, std::uint32_t& count) {
  unsigned num = 0;
  METRALE_TRY(check(driver_, driver_.cuModuleGetFunctionCount_(&num, handle), "cuModuleGetFunctionCount"));
  std::vector<CUfunction> functions(num);
  if (num != 0) {
    METRALE_TRY(check(driver_, driver_.cuModuleEnumerateFunctions_(functions.data(), num, handle), "cuModuleEnumerateFunctions"));
  }
  std::vector<Kernel*> added;
  for (const CUfunction function : functions) {
    const char* entry = nullptr;
    METRALE_TRY(check(driver_, driver_.cuFuncGetName_(&entry, function), "cuFuncGetName"));
    auto kernel = std::make_unique<Kernel>();
    kernel->function = function;
    kernel->name = fmt::format("{}.{}", name, entry == nullptr ? "" : entry);
    kernel->module_chars = static_cast<std::uint32_t>(name.size());
    METRALE_TRY(read_signature(*kernel));
    const Key key{kernel->module(), kernel->entry()};
    added.push_back(kernel.get());
    kernels_.erase(key);  // a key refers to its own kernel's name
    kernels_.emplace(key, std::move(kernel));
  }
  METRALE_TRY(read_published(name, handle, added));
  count = static_cast<std::uint32_t>(added.size());
  return {};
}

Result<> Modules::read_signature(Kernel& kernel) {
  const ExpectedRefusal end_of_list;
  for (std::size_t i = 0; i < kMaxParams; ++i) {
    std::size_t offset = 0;
    std::size_t bytes = 0;
    const CUresult code = driver_.cuFuncGetParamInfo_(kernel.function, i, &offset, &bytes);
    if (code == CUDA_ERROR_INVALID_VALUE) return {};  // how the driver says that there are no more
    METRALE_TRY(check(driver_, code, "cuFuncGetParamInfo"));
    kernel.param_offsets.push_back(static_cast<std::uint32_t>(offset));
    kernel.facts.param_bytes.push_back(static_cast<std::uint32_t>(bytes));
  }
  return Error(Errc::bad_format, fmt::format("kernel {} has more than {} parameters", kernel.name, kMaxParams));
}

Result<> Modules::read_published(const std::string& module, CUmodule handle, std::span<Kernel* const> kernels) {
  struct Wanted {
    Kernel* kernel;
    std::string_view suffix;
    CUdeviceptr address;
    std::uint32_t value;
  };
  std::vector<Wanted> found;
  for (Kernel* const kernel : kernels) {
    for (const std::string_view suffix : {"_n_tile", "_a_e4m3", "_waits"}) {
      const std::string name = fmt::format("{}{}", kernel->entry(), suffix);
      CUdeviceptr address = 0;
      std::size_t bytes = 0;
      const CUresult code = [&] {
        const ExpectedRefusal where_it_publishes_nothing;
        return driver_.cuModuleGetGlobal_(&address, &bytes, handle, name.c_str());
      }();
      if (code == CUDA_ERROR_NOT_FOUND) continue;
      METRALE_TRY(check(driver_, code, "cuModuleGetGlobal"));
      if (bytes != sizeof(std::uint32_t)) {
        return Error(Errc::bad_format, fmt::format("{}.{} has {} bytes; a kernel publishes 32-bit numbers", module, name, bytes));
      }
      found.push_back({kernel, suffix, address, 0});
    }
  }
  if (found.empty()) return {};
  // On a stream of its own: the legacy stream would wait for others, and break their captures.
  CUstream stream = nullptr;
  METRALE_TRY(
      check(driver_, driver_.cuStreamCreateWithPriority_(&stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority"));
  Result<> read;
  for (Wanted& wanted : found) {
    read = check(driver_, driver_.cuMemcpyDtoHAsync_(&wanted.value, wanted.address, sizeof(wanted.value), stream),
                 "cuMemcpyDtoHAsync");
    if (!read) break;
  }
  // What was enqueued writes into `found`, so it is waited for in any case.
  Result<> waited = check(driver_, driver_.cuStreamSynchronize_(stream), "cuStreamSynchronize");
  Result<> destroyed = check(driver_, give_back_insisting([&] { return driver_.cuStreamDestroy_(stream); }), "cuStreamDestroy");
  METRALE_TRY(std::move(read));
  METRALE_TRY(std::move(waited));
  METRALE_TRY(std::move(destroyed));
  for (const Wanted& wanted : found) {
    KernelFacts& facts = wanted.kernel->facts;
    if (wanted.suffix == "_n_tile") facts.n_tile = wanted.value;
    if (wanted.suffix == "_a_e4m3") facts.casts_a_to_e4m3 = wanted.value != 0;
    if (wanted.suffix == "_waits") facts.waits_for_dependency = wanted.value != 0;
  }
  return {};
}

// Of the memory of a multiprocessor, in percent: on an H200 164 KiB as shared memory, which leaves the matrix kernels the
// first-level cache that their loads pass through.
constexpr int kSharedPercent = 72;

Result<> Modules::load_code(Kernel& kernel) {
  METRALE_TRY(check(driver_, driver_.cuFuncLoad_(kernel.function), "cuFuncLoad"));
  const auto attribute = [&](CUfunction_attribute which) -> Result<std::uint32_t> {
    int value = 0;
    METRALE_TRY(check(driver_, driver_.cuFuncGetAttribute_(&value, which, kernel.function), "cuFuncGetAttribute"));
    return static_cast<std::uint32_t>(std::max(value, 0));
  };
  kernel.static_shared_bytes = METRALE_TRY(attribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES));
  kernel.max_threads = METRALE_TRY(attribute(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK));
  kernel.max_dynamic_shared_bytes = max_shared_bytes_ - std::min(max_shared_bytes_, kernel.static_shared_bytes);
  METRALE_TRY(check(driver_,
                    driver_.cuFuncSetAttribute_(kernel.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                                static_cast<int>(kernel.max_dynamic_shared_bytes)),
                    "cuFuncSetAttribute"));
  // The same for all: between two launches that differ in it a multiprocessor empties and is set up anew, some 5 us. A kernel whose
  // blocks need more gets more.
  METRALE_TRY(check(
      driver_, driver_.cuFuncSetAttribute_(kernel.function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, kSharedPercent),
      "cuFuncSetAttribute"));
  kernel.loaded.store(true, std::memory_order_release);
  return {};
}

Result<> Modules::ensure_loaded() {
  std::unique_lock lock(mutex_);
  if (is_loaded_) return {};
  if (OutsideCapture::num_on_thread() != 0) {
    return Error(Errc::capture_unsafe,
                 "the modules were unloaded, and loading them would break a capture that this thread holds; look "
                 "one kernel up before the capture begins");
  }
  CurrentContext context(driver_, context_);
  METRALE_TRY(context.enter());
  METRALE_TRY(load_all());
  num_lazy_loads_.fetch_add(loaded_.size(), std::memory_order_relaxed);
  return {};
}

// ---- dropping ----

Result<> Modules::drop_all() noexcept {
  Result<> first;
  for (auto& [name, loaded] : loaded_) {
    if (loaded.handle == nullptr) continue;
    CUresult code = driver_.cuModuleUnload_(loaded.handle);
    // Once more where the driver refused: nobody knows of it afterwards.
    if (code != CUDA_SUCCESS && !is_gone(code) && !is_sticky(code)) code = driver_.cuModuleUnload_(loaded.handle);
    if (code != CUDA_SUCCESS && !is_gone(code) && first) {
      first = guarded([&]() -> Result<> {
        return driver_error(driver_, code, "cuModuleUnload").with_note(fmt::format("while unloading kernel module {}", name));
      });
    }
  }
  kernels_.clear();
  loaded_.clear();
  is_loaded_ = false;
  return first;
}

Result<> Modules::unload() noexcept {
  std::unique_lock lock(mutex_);
  if (loaded_.empty()) return {};
  CurrentContext context(driver_, context_);
  // Whatever it says: the bookkeeping goes, and where the context has gone its modules went with it.
  Result<> entered = guarded([&] { return context.enter(); });
  Result<> dropped = drop_all();
  if (!dropped) return dropped;
  if (!entered && !is_gone(static_cast<CUresult>(entered.error().native_code()))) return entered;
  return {};
}

void Modules::forget() noexcept {
  std::unique_lock lock(mutex_);
  kernels_.clear();
  loaded_.clear();
}

// ---- look-ups ----

bool Modules::has_module(std::string_view module) const noexcept { return sources_.find(module) != sources_.end(); }

Result<const Kernel*> Modules::find(std::string_view module, std::string_view function) {
  return guarded([&]() -> Result<const Kernel*> {
    std::shared_lock lock(mutex_);
    if (!is_loaded_) [[unlikely]] {
      lock.unlock();
      METRALE_TRY(ensure_loaded());
      lock.lock();
    }
    const auto it = kernels_.find({module, function});
    if (it == kernels_.end()) return missing(module, function);
    Kernel& kernel = *it->second;
    if (!kernel.loaded.load(std::memory_order_acquire)) [[unlikely]] {
      const std::lock_guard one_at_a_time(code_mutex_);
      if (!kernel.loaded.load(std::memory_order_relaxed)) {
        CurrentContext context(driver_, context_);
        METRALE_TRY(context.enter());
        if (auto loaded = load_code(kernel); !loaded) {
          return std::move(loaded).error().with_note(fmt::format("while loading kernel {}", kernel.name));
        }
        num_lazy_loads_.fetch_add(1, std::memory_order_relaxed);
      }
    }
    return &kernel;
  });
}

Error Modules::missing(std::string_view module, std::string_view function) const {
  if (!has_module(module)) {
    std::vector<std::string_view> names;
    for (const auto& [name, source] : sources_) names.push_back(name);
    return Error(Errc::not_found, fmt::format("no CUDA module '{}' for kernel '{}'; there are: {}", module, function,
                                              names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "))));
  }
  std::vector<std::string_view> names;
  for (auto it = kernels_.lower_bound({module, ""}); it != kernels_.end() && it->first.first == module; ++it) {
    names.push_back(it->first.second);
  }
  return Error(Errc::not_found, fmt::format("no kernel '{}' in CUDA module '{}' ({}), which has: {}", function, module,
                                            sources_.find(module)->second.origin, fmt::join(names, ", ")));
}

LoadReport Modules::load_report() const {
  std::shared_lock lock(mutex_);
  LoadReport report{.modules = {}, .num_lazy_loads = num_lazy_loads_.load(std::memory_order_relaxed)};
  for (const auto& [name, loaded] : loaded_) report.modules.push_back(loaded.report);
  return report;
}

Result<std::vector<KernelRegistry::Entry>> Modules::entries() const {
  return guarded([&]() -> Result<std::vector<Entry>> {
    METRALE_TRY(const_cast<Modules*>(this)->ensure_loaded());  // what is loaded is a cache
    std::shared_lock lock(mutex_);
    std::vector<Entry> entries;
    entries.reserve(kernels_.size());
    for (const auto& [key, kernel] : kernels_) {
      entries.push_back({std::string(key.first), std::string(key.second), kernel->facts});
    }
    return entries;
  });
}

Result<DeviceSymbol> Modules::device_symbol(std::string_view module, std::string_view name, std::source_location site) {
  return guarded([&]() -> Result<DeviceSymbol> {
    METRALE_TRY(ensure_loaded());
    std::shared_lock lock(mutex_);
    const auto it = loaded_.find(module);
    if (it == loaded_.end()) {
      return Error(Errc::not_found, fmt::format("no CUDA module '{}' for the global '{}'", module, name), site);
    }
    CurrentContext context(driver_, context_);
    METRALE_TRY(context.enter());
    CUdeviceptr address = 0;
    std::size_t bytes = 0;
    const CUresult code = driver_.cuModuleGetGlobal_(&address, &bytes, it->second.handle, std::string(name).c_str());
    if (code == CUDA_ERROR_NOT_FOUND) {
      return Error(Errc::not_found, fmt::format("no global '{}' in CUDA module '{}'", name, module), site);
    }
    METRALE_TRY(check(driver_, code, "cuModuleGetGlobal"));
    return DeviceSymbol{{address}, bytes};
  });
}

}  // namespace metrale::cuda
