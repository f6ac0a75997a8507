// SPDX-License-Identifier: Apache-2.0
//
// What the cases are written with: a fixture that has a fresh backend, helpers that end a case on failure, a gate that holds a
// stream, and threads whose failures reach the case. A case names the capabilities it needs first; without them it is skipped with
// the reason. Nothing here waits without a bound: a lost event fails its case after `kPatience`.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "conformance/backend_under_test.h"
#include "conformance/test_kernels.h"
#include "metrale/backend.h"

namespace metrale::conformance {

using Site = std::source_location;
using enum Capability;
using std::chrono::milliseconds;

/// How long a case waits for what must happen.
extern const std::chrono::nanoseconds kPatience;
/// How long a call that must wait is given to show that it does not.
inline constexpr milliseconds kGrace{30};

// ---- failures ----

/// Fails the running case at `site` and leaves it.
[[noreturn]] void fail(Site site, const std::string& text);

/// The value of a call that has to succeed; leaves the case otherwise.
template <class T>
T must(Result<T> result, Site site = Site::current()) {
  if (!result) fail(site, result.error().to_string());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

template <class T>
::testing::AssertionResult ok(const Result<T>& result) {
  if (result) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << result.error().to_string();
}

::testing::AssertionResult error_is(const Error& error, Errc code, std::initializer_list<std::string_view> words);

/// Whether a call was refused with `code`, in one line whose text has all `words`.
template <class T>
::testing::AssertionResult refused(const Result<T>& result, Errc code, std::initializer_list<std::string_view> words = {}) {
  if (result) return ::testing::AssertionFailure() << "ok, where " << to_string(code) << " is promised";
  return error_is(result.error(), code, words);
}

/// "file.cpp:12", as messages and reports write a call site, without folders.
std::string where(Site site = Site::current());
/// The line above the call, in that form.
std::string line_above(Site site = Site::current());

// ---- bytes ----

/// Bytes that differ from place to place and from seed to seed.
std::vector<std::byte> pattern(std::size_t size, unsigned seed);

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

// ---- threads ----

/// Runs `body` on another thread, waits for it, and lets its failure leave the case.
void on_thread(const std::function<void()>& body);
/// Runs `body(i)` for each i below `count`, each on a thread of its own, all at once.
void on_threads(std::size_t count, const std::function<void(std::size_t)>& body);

/// Waits until `done()` is true; false after `kPatience`.
bool eventually(const std::function<bool()>& done);

// ---- a held stream ----

/// Holds a stream, by a host function that waits, until `open`. Opens by itself after `kPatience` and at its end, so that a case
/// which fails does not hang; the case fails when nothing else had opened it.
class Gate {
 public:
  Gate(GpuBackend& backend, StreamHandle stream, Site site = Site::current());
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void open();
  /// Whether the stream has come to the gate; waits for that.
  bool reached();

 private:
  struct State;
  std::shared_ptr<State> state_;
  Site site_;
};

/// A call that runs on another thread. Its failure leaves the case at `join`; its end joins too.
class Background {
 public:
  explicit Background(std::function<void()> body);
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  /// Whether it is back, after at most `kGrace`.
  bool is_back();
  void join();

 private:
  std::exception_ptr failure_;
  std::future<void> end_;
  std::thread thread_;
};

/// Runs `call` on another thread while `gate` is shut, then opens it and waits for the call. Returns whether the call was
/// back before.
bool returns_before(Gate& gate, const std::function<void()>& call);

// ---- the fixture ----

class Case : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;
  /// Whether the environment's switches reach the backends of this case; otherwise what a case does not set is off.
  virtual bool follows_environment() const { return false; }

  /// The backend of this case, fresh.
  GpuBackend& gpu() { return *gpu_; }
  /// Another fresh backend of the same kind.
  std::unique_ptr<GpuBackend> make(const CreateOptions& options = {});
  /// Replaces the backend of this case by one made with `options`.
  void remake(const CreateOptions& options);
  /// Shuts the backend of this case down and destroys it.
  void unmake();

  /// Skips the case unless the backend has all of these.
  void need(std::initializer_list<Capability> capabilities);
  /// Skips the case with `reason` unless `condition`.
  void need(bool condition, std::string_view reason);

  StreamHandle stream(Site site = Site::current()) { return must(gpu().create_stream(0), site); }
  EventHandle event(Site site = Site::current()) { return must(gpu().create_event(), site); }
  DevicePtr block(std::uint64_t bytes, Site site = Site::current()) { return must(gpu().alloc(bytes), site); }
  KernelHandle kernel(std::string_view function, Site site = Site::current()) {
    return must(gpu().kernel(kModule, function), site);
  }

  /// Waits for a stream, at most `kPatience`.
  void settle(StreamHandle s, Site site = Site::current()) { must(gpu().synchronize_for(s, kPatience), site); }

  /// Whether a stream with work behind a shut gate is held; what runs ahead of its stream has time to show.
  ::testing::AssertionResult is_held(StreamHandle s) { return refused(gpu().synchronize_for(s, kGrace), Errc::timeout); }

  /// Writes to the device and returns when it is there.
  template <class T>
  void write(DevicePtr ptr, const std::vector<T>& values, Site site = Site::current()) {
    must(gpu().copy_h2d(ptr, bytes_of(values)), site);
  }
  /// Fills `bytes` bytes and returns when it is done.
  void fill(DevicePtr ptr, std::uint8_t value, std::uint64_t bytes, Site site = Site::current());
  /// What the device holds now; ordered after the default stream only.
  template <class T = std::byte>
  std::vector<T> read(DevicePtr ptr, std::size_t count, Site site = Site::current()) {
    std::vector<T> values(count);
    must(gpu().copy_d2h(std::as_writable_bytes(std::span(values)), ptr), site);
    return values;
  }
  /// Whether all `bytes` bytes at `ptr` are `value`.
  ::testing::AssertionResult holds(DevicePtr ptr, std::size_t bytes, std::uint8_t value, Site site = Site::current());

  /// Memory that stands for another library's.
  DevicePtr foreign_memory(std::uint64_t bytes);

  /// Launches with plain geometry.
  void launch(KernelHandle k, StreamHandle s, std::initializer_list<KernelArg> args, Dim3 grid = {}, Dim3 threads = {},
              Site site = Site::current());
  /// Appends `value` to the log at `log`: order and count of the work on a stream become visible. Made of a kernel.
  void append(DevicePtr log, std::uint32_t value, StreamHandle s, Site site = Site::current());
  /// A log with room for `capacity` values, empty.
  DevicePtr make_log(std::size_t capacity, Site site = Site::current());
  std::vector<std::uint32_t> read_log(DevicePtr log, std::size_t capacity, Site site = Site::current());

  /// What was logged by the library since the case began, in order.
  std::vector<std::string> log_lines() const;
  /// The lines among them that contain `word`.
  std::vector<std::string> log_lines(std::string_view word) const;

  /// Runs this case in a process of its own, because it loses the device or wants `variables` ("NAME=value") in the environment;
  /// call first in a body. False in that process: go on. True in the suite's: the case was run, and its failure was taken over.
  bool isolated(const std::vector<std::string>& variables = {});

 private:
  struct Log;
  std::shared_ptr<Log> log_;
  std::unique_ptr<GpuBackend> gpu_;
};

/// A fixture whose cases all need these capabilities.
template <Capability... kNeeded>
class CaseNeeding : public Case {
 protected:
  void SetUp() override {
    Case::SetUp();
    need({kNeeded...});
  }
};

}  // namespace metrale::conformance
