// SPDX-License-Identifier: Apache-2.0
#include "conformance/case.h"

#include <algorithm>
#include <exception>
#include <future>
#include <thread>

#include <fmt/format.h>

#include "conformance/run_state.h"
#include "metrale/log.h"

namespace metrale::conformance {

namespace {

#if defined(__SANITIZE_THREAD__)
constexpr int kSlowness = 5;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
constexpr int kSlowness = 5;
#else
constexpr int kSlowness = 1;
#endif
#else
constexpr int kSlowness = 1;
#endif

std::string_view file_of(const Site& site) {
  const std::string_view path = site.file_name();
  return path.substr(path.rfind('/') + 1);
}

[[noreturn]] void leave(const char* why) {
  throw ::testing::AssertionException(::testing::TestPartResult(::testing::TestPartResult::kFatalFailure, nullptr, -1, why));
}

}  // namespace

const std::chrono::nanoseconds kPatience = std::chrono::seconds(2) * kSlowness;

void fail(Site site, const std::string& text) {
  [&] { GTEST_FAIL_AT(site.file_name(), static_cast<int>(site.line())) << text; }();
  leave("left after a failure");
}

::testing::AssertionResult error_is(const Error& error, Errc code, std::initializer_list<std::string_view> words) {
  const std::string text = error.to_string();
  if (error.code() != code) return ::testing::AssertionFailure() << "refused, not with " << to_string(code) << ": " << text;
  if (text.find('\n') != std::string::npos) return ::testing::AssertionFailure() << "the text has more than one line: " << text;
  for (const std::string_view word : words) {
    if (text.find(word) == std::string::npos) return ::testing::AssertionFailure() << "the text lacks '" << word << "': " << text;
  }
  return ::testing::AssertionSuccess();
}

std::string where(Site site) { return fmt::format("{}:{}", file_of(site), site.line()); }

std::string line_above(Site site) { return fmt::format("{}:{}", file_of(site), site.line() - 1); }

std::vector<std::byte> pattern(std::size_t size, unsigned seed) {
  std::vector<std::byte> bytes(size);
  std::uint32_t state = seed * 2654435761u + 1;
  for (std::byte& b : bytes) {
    state = state * 1664525u + 1013904223u;
    b = static_cast<std::byte>(state >> 24);
  }
  return bytes;
}

// ---- threads ----

void on_threads(std::size_t count, const std::function<void(std::size_t)>& body) {
  std::vector<std::exception_ptr> failures(count);
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      try {
        body(i);
      } catch (...) {
        failures[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

void on_thread(const std::function<void()>& body) {
  on_threads(1, [&](std::size_t) { body(); });
}

bool eventually(const std::function<bool()>& done) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

// ---- gate ----

struct Gate::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_open = false;
  bool was_reached = false;
  bool gave_up = false;

  void hold() {
    std::unique_lock lock(mutex);
    was_reached = true;
    changed.notify_all();
    if (!changed.wait_for(lock, kPatience, [&] { return is_open; })) gave_up = true;
  }
};

Gate::Gate(GpuBackend& backend, StreamHandle stream, Site site) : state_(std::make_shared<State>()), site_(site) {
  must(backend.enqueue_host(stream, [state = state_] { state->hold(); }), site);
}

Gate::~Gate() {
  open();
  std::lock_guard lock(state_->mutex);
  if (state_->gave_up) {
    ADD_FAILURE_AT(site_.file_name(), static_cast<int>(site_.line())) << "a call waited for the work held by this gate";
  }
}

void Gate::open() {
  std::lock_guard lock(state_->mutex);
  state_->is_open = true;
  state_->changed.notify_all();
}

bool Gate::reached() {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, kPatience, [&] { return state_->was_reached; });
}

// ---- background ----

Background::Background(std::function<void()> body) {
  std::promise<void> ended;
  end_ = ended.get_future();
  std::promise<void> started;
  std::future<void> start = started.get_future();
  thread_ = std::thread([this, body = std::move(body), ended = std::move(ended), started = std::move(started)]() mutable {
    started.set_value();
    try {
      body();
    } catch (...) {
      failure_ = std::current_exception();
    }
    ended.set_value();
  });
  start.wait();
}

Background::~Background() {
  if (thread_.joinable()) thread_.join();
}

bool Background::is_back() { return end_.wait_for(kGrace) == std::future_status::ready; }

void Background::join() {
  thread_.join();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

bool returns_before(Gate& gate, const std::function<void()>& call) {
  Background background(call);
  const bool before = background.is_back();
  gate.open();
  background.join();
  return before;
}

// ---- fixture ----

struct Case::Log {
  mutable std::mutex mutex;
  std::vector<std::string> lines;
};

void Case::SetUp() {
  if (const std::string why = exclusion_of_running_case(); !why.empty()) need(false, why);
  log_ = std::make_shared<Log>();
  set_log_sink([log = log_](LogLevel, std::string_view line) {
    std::lock_guard lock(log->mutex);
    log->lines.emplace_back(line);
  });
  gpu_ = make();
}

void Case::TearDown() {
  unmake();
  set_log_sink({});
  if (!HasFailure() || !log_) return;
  for (const std::string& line : log_lines()) note_for_running_case("logged: " + line);
}

std::unique_ptr<GpuBackend> Case::make(const CreateOptions& options) {
  CreateOptions settled = options;
  if (!follows_environment()) {
    settled.face.redzone_bytes = options.face.redzone_bytes.value_or(0);
    settled.face.debug_sync_kernels = options.face.debug_sync_kernels.value_or(false);
    settled.face.unchecked_copies = options.face.unchecked_copies.value_or(false);
  }
  Result<std::unique_ptr<GpuBackend>> made = under_test().create(settled);
  if (!made && made.error().code() == Errc::unsupported && !is_required(under_test().name)) {
    need(false, "this machine cannot run it: " + made.error().message());
  }
  return must(std::move(made));
}

void Case::remake(const CreateOptions& options) {
  unmake();
  gpu_ = make(options);
}

void Case::unmake() {
  if (!gpu_) return;
  // A backend whose work never ends is left behind, with the thread that waits for it: the case fails, the suite goes on.
  auto done = std::make_shared<std::promise<void>>();
  std::future<void> end = done->get_future();
  std::thread([gpu = std::move(gpu_), done]() mutable {
    gpu.reset();
    done->set_value();
  }).detach();
  if (end.wait_for(2 * kPatience) != std::future_status::ready) {
    ADD_FAILURE() << "the backend did not shut down within "
                  << std::chrono::duration_cast<std::chrono::seconds>(2 * kPatience).count() << " s: some work never ended";
  }
}

void Case::need(bool condition, std::string_view reason) {
  if (condition) return;
  [&] { GTEST_SKIP() << reason; }();
  leave("left because it was skipped");
}

void Case::need(std::initializer_list<Capability> capabilities) {
  for (const Capability c : capabilities) {
    if (!gpu().capabilities().has(c)) {
      need(false, std::string("needs ") + std::string(to_string(c)) + ": " + std::string(gpu().capabilities().why_not(c)));
    }
  }
}

void Case::fill(DevicePtr ptr, std::uint8_t value, std::uint64_t bytes, Site site) { must(gpu().memset(ptr, value, bytes), site); }

::testing::AssertionResult Case::holds(DevicePtr ptr, std::size_t bytes, std::uint8_t value, Site site) {
  const std::vector<std::byte> seen = read(ptr, bytes, site);
  const auto wrong = std::find_if(seen.begin(), seen.end(), [&](std::byte b) { return b != std::byte{value}; });
  if (wrong == seen.end()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "byte " << (wrong - seen.begin()) << " of " << bytes << " is "
                                       << static_cast<unsigned>(*wrong) << ", not " << static_cast<unsigned>(value);
}

DevicePtr Case::foreign_memory(std::uint64_t bytes) {
  if (under_test().foreign_memory) return under_test().foreign_memory(bytes);
  static std::uint64_t next = std::uint64_t{1} << 46;
  return {std::exchange(next, next + round_up(bytes, 4096))};
}

void Case::launch(KernelHandle k, StreamHandle s, std::initializer_list<KernelArg> args, Dim3 grid, Dim3 threads, Site site) {
  must(gpu().launch_typed(k, grid, threads, 0, s, std::span(args.begin(), args.size())), site);
}

void Case::append(DevicePtr log, std::uint32_t value, StreamHandle s, Site site) {
  launch(kernel(kAppend, site), s, {KernelArg::buffer(log), KernelArg::value(value)}, {}, {}, site);
}

DevicePtr Case::make_log(std::size_t capacity, Site site) {
  const DevicePtr log = block((capacity + 1) * sizeof(std::uint32_t), site);
  fill(log, 0, (capacity + 1) * sizeof(std::uint32_t), site);
  return log;
}

std::vector<std::uint32_t> Case::read_log(DevicePtr log, std::size_t capacity, Site site) {
  std::vector<std::uint32_t> values = read<std::uint32_t>(log, capacity + 1, site);
  const std::size_t count = std::min<std::size_t>(values.front(), capacity);
  return {values.begin() + 1, values.begin() + 1 + static_cast<std::ptrdiff_t>(count)};
}

std::vector<std::string> Case::log_lines() const { return log_lines(""); }

std::vector<std::string> Case::log_lines(std::string_view word) const {
  std::vector<std::string> found;
  std::lock_guard lock(log_->mutex);
  std::copy_if(log_->lines.begin(), log_->lines.end(), std::back_inserter(found),
               [&](const std::string& line) { return line.find(word) != std::string::npos; });
  return found;
}

bool Case::isolated(const std::vector<std::string>& variables) {
  if (in_child_process()) return false;
  const ChildResult child = run_case_in_child(variables);
  if (child.passed) return true;
  fail(Site::current(), "in its own process: " + child.output);
}

}  // namespace metrale::conformance
