// SPDX-License-Identifier: Apache-2.0
//
// The table: every call is counted and perhaps failed on its way to the function behind it. Then what tests ask a fake.
#include "support/fake_cuda/fake_gpu.h"

#include <fmt/format.h>

#include <array>
#include <deque>
#include <stdexcept>

#include "support/fake_cuda/api.h"
#include "support/fake_cuda/state.h"

namespace metrale::fake_cuda {

namespace {

enum Index : int {
#define METRALE_FAKE_CUDA_INDEX(name, version) k_##name,
  METRALE_CUDA_REQUIRED(METRALE_FAKE_CUDA_INDEX) METRALE_CUDA_OPTIONAL(METRALE_FAKE_CUDA_INDEX)
#undef METRALE_FAKE_CUDA_INDEX
      kNumFunctions
};

constexpr std::array<std::string_view, kNumFunctions> kNames{
#define METRALE_FAKE_CUDA_NAME(name, version) #name,
    METRALE_CUDA_REQUIRED(METRALE_FAKE_CUDA_NAME) METRALE_CUDA_OPTIONAL(METRALE_FAKE_CUDA_NAME)
#undef METRALE_FAKE_CUDA_NAME
};

int index_of(std::string_view function) {
  const auto at = std::find(kNames.begin(), kNames.end(), function);
  if (at == kNames.end()) throw std::invalid_argument("no such function in the table: " + std::string(function));
  return static_cast<int>(at - kNames.begin());
}

/// Counts a call; the code to answer instead of making it.
CUresult count(int function) {
  State* state = current_state.load();
  if (state == nullptr) return CUDA_SUCCESS;
  CUresult code = CUDA_SUCCESS;
  {
    const std::lock_guard lock(state->call_mutex);
    const std::uint64_t all = ++state->num_calls;
    const std::uint64_t same = ++state->calls_of[static_cast<std::size_t>(function)];
    for (auto at = state->injections.begin(); at != state->injections.end(); ++at) {
      if (at->function < 0 ? at->at != all : at->function != function || at->at != same) continue;
      code = at->code;
      state->failed_function = function;
      state->injections.erase(at);
      break;
    }
  }
  if (is_sticky(code)) {
    const std::lock_guard lock(state->mutex);
    const std::shared_ptr<Context> context = state->contexts.find(current_context);
    if (context != nullptr) context->sticky = code;
    for (Device& device : state->devices) {
      if (context == nullptr || context->device == &device) device.sticky = code;
    }
    state->changed.notify_all();
  }
  return code;
}

/// Lets the driver's own allocations succeed while it lives.
class OwnHeap {
 public:
  OwnHeap() {
    if (const State* state = current_state.load(); state != nullptr) fail_ = state->options.fail_allocation;
    if (fail_ != nullptr) left_ = fail_(-1);
  }
  ~OwnHeap() {
    if (fail_ != nullptr) fail_(left_);
  }
  OwnHeap(const OwnHeap&) = delete;
  OwnHeap& operator=(const OwnHeap&) = delete;

 private:
  decltype(Options::fail_allocation) fail_ = nullptr;
  std::int64_t left_ = -1;
};

template <int kIndex, auto kFunction, class T = decltype(kFunction)>
struct Counted;

template <int kIndex, auto kFunction, class... A>
struct Counted<kIndex, kFunction, CUresult (*)(A...)> {
  static CUresult CUDAAPI call(A... arguments) {
    const OwnHeap heap;
    const CUresult code = count(kIndex);
    return code == CUDA_SUCCESS ? kFunction(arguments...) : code;
  }
};

const cuda::Driver& make_table(int version) {
  static std::deque<cuda::Driver> tables;
  cuda::Driver& driver = tables.emplace_back();
#define METRALE_FAKE_CUDA_FILL(name, version) driver.name##_ = &Counted<k_##name, &api::name>::call;
  METRALE_CUDA_REQUIRED(METRALE_FAKE_CUDA_FILL)
  METRALE_CUDA_OPTIONAL(METRALE_FAKE_CUDA_FILL)
#undef METRALE_FAKE_CUDA_FILL
  driver.version = version;
  return driver;
}

}  // namespace

std::string Live::to_string() const {
  return fmt::format(
      "{} retains of contexts, {} blocks of {} bytes, {} registrations, {} streams, {} events, {} graphs, {} executable graphs, "
      "{} user objects, {} modules",
      contexts, blocks, bytes, registrations, streams, events, graphs, graph_execs, user_objects, modules);
}

FakeGpu::FakeGpu(Options options) : state_(std::make_unique<State>(options)), driver_(make_table(options.driver_version)) {
  state_->calls_of.resize(kNumFunctions);
  State* none = nullptr;
  if (!current_state.compare_exchange_strong(none, state_.get())) throw std::logic_error("a FakeGpu is alive already");
}

FakeGpu::~FakeGpu() {
  current_state.store(nullptr);
  state_.reset();
}

cuda::Driver FakeGpu::driver_without(std::initializer_list<std::string_view> functions) const {
  cuda::Driver driver = driver_;
  for (const std::string_view function : functions) {
    (void)index_of(function);
#define METRALE_FAKE_CUDA_CLEAR(name, version) \
  if (function == #name) driver.name##_ = nullptr;
    METRALE_CUDA_OPTIONAL(METRALE_FAKE_CUDA_CLEAR)
#undef METRALE_FAKE_CUDA_CLEAR
  }
  return driver;
}

cuda::ModuleImage FakeGpu::add_module(std::string_view module, std::span<const host::HostKernel> kernels,
                                      std::span<const Global> globals, int architecture) {
  register_kernels(kernels);
  std::string text = fmt::format("// fake-cuda-module 1\n.version 8.0\n.target sm_{}\nmodule {}\n", architecture, module);
  const auto global = [&](std::string_view name, std::uint64_t bytes, std::uint64_t value) {
    text += fmt::format("global {} {} {}\n", name, bytes, value);
  };
  for (const host::HostKernel& kernel : kernels) {
    if (kernel.module != module) continue;
    text += fmt::format("kernel {}", kernel.function);
    for (const std::uint32_t bytes : kernel.param_bytes) text += fmt::format(" {}", bytes);
    text += '\n';
    if (kernel.n_tile) global(fmt::format("{}_n_tile", kernel.function), 4, *kernel.n_tile);
    if (kernel.casts_a_to_e4m3) global(fmt::format("{}_a_e4m3", kernel.function), 4, 1);
    if (kernel.waits_for_dependency) global(fmt::format("{}_waits", kernel.function), 4, 1);
  }
  for (const Global& each : globals) global(each.name, each.bytes, each.value);
  const std::lock_guard lock(state_->mutex);
  const std::string& kept = state_->images.emplace_back(std::move(text));
  const std::string& name = state_->images.emplace_back(module);
  return {name, {reinterpret_cast<const std::byte*>(kept.data()), kept.size()}};
}

void FakeGpu::register_kernels(std::span<const host::HostKernel> kernels) {
  const std::lock_guard lock(state_->mutex);
  for (const host::HostKernel& kernel : kernels)
    state_->kernels[{std::string(kernel.module), std::string(kernel.function)}] = kernel.fn;
}

// ---- calls ----

std::uint64_t FakeGpu::num_calls() const {
  const std::lock_guard lock(state_->call_mutex);
  return state_->num_calls;
}

std::uint64_t FakeGpu::num_calls(std::string_view function) const {
  const std::lock_guard lock(state_->call_mutex);
  return state_->calls_of[static_cast<std::size_t>(index_of(function))];
}

void FakeGpu::reset_counts() {
  const std::lock_guard lock(state_->call_mutex);
  state_->num_calls = 0;
  state_->calls_of.assign(kNumFunctions, 0);
  state_->injections.clear();
}

void FakeGpu::fail_call(std::uint64_t nth, CUresult code) {
  const std::lock_guard lock(state_->call_mutex);
  state_->injections.push_back({state_->num_calls + nth, -1, code});
}

void FakeGpu::fail_call(std::string_view function, std::uint64_t nth, CUresult code) {
  const int index = index_of(function);
  const std::lock_guard lock(state_->call_mutex);
  state_->injections.push_back({state_->calls_of[static_cast<std::size_t>(index)] + nth, index, code});
}

void FakeGpu::clear_failures() {
  const std::lock_guard lock(state_->call_mutex);
  state_->injections.clear();
  state_->failed_function = -1;
}

std::string FakeGpu::failed_function() const {
  const std::lock_guard lock(state_->call_mutex);
  return state_->failed_function < 0 ? std::string() : std::string(kNames[static_cast<std::size_t>(state_->failed_function)]);
}

// ---- state ----

Live FakeGpu::live() const {
  Live live;
  {
    const std::lock_guard logs(state_->log_mutex);
    live.log_callbacks = state_->log_callbacks.size();
  }
  const std::lock_guard lock(state_->mutex);
  for (const Device& device : state_->devices) {
    if (device.primary) live.contexts += static_cast<std::size_t>(device.primary->num_retains);
  }
  for (const auto& [base, block] : state_->blocks) {
    if (block.kind == BlockKind::global || block.kind == BlockKind::foreign) continue;
    if (block.kind == BlockKind::registered) {
      ++live.registrations;
      continue;
    }
    ++live.blocks;
    live.bytes += block.bytes;
  }
  live.streams = state_->streams.size();
  live.events = state_->events.size();
  live.graphs = state_->graphs.size();
  live.graph_execs = state_->execs.size();
  live.user_objects = state_->user_objects.size();
  live.modules = state_->modules.size();
  return live;
}

std::vector<std::string> FakeGpu::dropped_with_context() {
  const std::lock_guard lock(state_->mutex);
  return std::exchange(state_->dropped, {});
}

std::vector<std::string> FakeGpu::misuses() const {
  const std::lock_guard lock(state_->mutex);
  return state_->misuses;
}

std::uint64_t FakeGpu::num_lazy_loads() const {
  const std::lock_guard lock(state_->mutex);
  return state_->num_lazy_loads;
}

std::vector<int> FakeGpu::stream_priorities() const {
  const std::lock_guard lock(state_->mutex);
  std::vector<int> priorities;
  state_->streams.for_each([&](const Stream& stream) { priorities.push_back(stream.priority); });
  return priorities;
}

int FakeGpu::num_retains(int device) const {
  const std::lock_guard lock(state_->mutex);
  const Device& of = state_->devices.at(static_cast<std::size_t>(device));
  return of.primary ? of.primary->num_retains : 0;
}

void FakeGpu::set_total_memory(std::uint64_t bytes, int device) {
  const std::lock_guard lock(state_->mutex);
  state_->devices.at(static_cast<std::size_t>(device)).options.total_bytes = bytes;
}

void FakeGpu::lose(CUresult code, int device) {
  std::shared_ptr<Context> context;
  {
    const std::lock_guard lock(state_->mutex);
    context = state_->devices.at(static_cast<std::size_t>(device)).primary;
  }
  if (context) state_->fault(*context, code, "the device was lost, as a test asked");
}

void FakeGpu::forget_faults() {
  const std::lock_guard lock(state_->mutex);
  for (Device& device : state_->devices) {
    device.sticky = CUDA_SUCCESS;
    if (device.primary) device.primary->sticky = CUDA_SUCCESS;
  }
}

CUdeviceptr FakeGpu::foreign_memory(std::uint64_t bytes) {
  const std::lock_guard lock(state_->mutex);
  Block block;
  block.kind = BlockKind::foreign;
  block.bytes = bytes;
  block.memory = std::shared_ptr<std::byte>(new std::byte[bytes + 256], std::default_delete<std::byte[]>());
  const std::uint64_t first = (reinterpret_cast<std::uintptr_t>(block.memory.get()) + 255) / 256 * 256;
  state_->blocks.emplace(first, std::move(block));
  return first;
}

}  // namespace metrale::fake_cuda
