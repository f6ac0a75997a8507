// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/context.h"

#include <fmt/format.h>

#include <map>
#include <mutex>
#include <utility>

#include "core/fault_latch.h"
#include "metrale/log.h"

namespace metrale::cuda {

namespace {

// Names contexts that are in use, and owns none.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<const Driver*, CUdevice>, std::weak_ptr<Context>> known;
};

Registry& registry() {
  // Never destroyed: backends in static objects may be released after everything static here.
  static Registry& instance = *new Registry;
  return instance;
}

std::uint64_t next_id() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

int& OutsideCapture::num_on_thread() noexcept {
  thread_local int count = 0;
  return count;
}

Context::Context(const Driver& driver, CUdevice device, CUcontext handle)
    : driver_(driver), device_(device), handle_(handle), id_(next_id()), created_at_fork_(detail::fork_count()), work_(driver) {}

Result<std::shared_ptr<Context>> Context::of_device(const Driver& driver, int ordinal) {
  int count = 0;
  METRALE_TRY(cuda::check(driver, driver.cuDeviceGetCount_(&count), "cuDeviceGetCount"));
  if (ordinal < 0 || ordinal >= count) {
    return Error(Errc::invalid_argument,
                 fmt::format("no CUDA device {}: there {} {}, numbered from 0", ordinal, count == 1 ? "is" : "are", count));
  }
  CUdevice device = 0;
  METRALE_TRY(cuda::check(driver, driver.cuDeviceGet_(&device, ordinal), "cuDeviceGet"));
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.known, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Context>& known = all.known[{&driver, device}];
  if (auto context = known.lock()) return context;
  CUcontext handle = nullptr;
  METRALE_TRY(cuda::check(driver, driver.cuDevicePrimaryCtxRetain_(&handle, device), "cuDevicePrimaryCtxRetain"));
  std::shared_ptr<Context> context;
  try {
    context.reset(new Context(driver, device, handle));
  } catch (...) {
    static_cast<void>(driver.cuDevicePrimaryCtxRelease_(device));
    throw;
  }
  known = context;
  return context;
}

Context::~Context() {
  // In a forked child the driver is not to be touched; a lost context goes with the process, and asking it may hang.
  if (created_at_fork_ != detail::fork_count() || is_lost()) return;
  CUcontext current = nullptr;
  static_cast<void>(driver_.cuCtxGetCurrent_(&current));
  if (current != handle_) static_cast<void>(make_current().has_value());
  work_.events().close();
  while (const auto block = spares_.take_any()) {
    static_cast<void>(give_back_insisting([&] { return driver_.cuMemFree_(block->base.address); }));
  }
  static_cast<void>(give_back_insisting([&] { return driver_.cuDevicePrimaryCtxRelease_(device_); }));
  if (current != handle_) static_cast<void>(driver_.cuCtxSetCurrent_(current));
}

Error Context::error(CUresult code, std::string_view what) {
  Error made = driver_error(driver_, code, what);
  if (!is_sticky(code)) return made;
  is_lost_.store(true, std::memory_order_release);
  std::string kernels = work_.kernels_in_flight();
  if (kernels.empty()) return made;
  Error named = Error(made.code(), fmt::format("{}; kernels last launched: {}", made.message(), kernels))
                    .with_native(made.native_code(), made.native_text());
  for (const std::string& note : made.notes()) named = std::move(named).with_note(note);
  return named;
}

int Context::attribute(CUdevice_attribute attribute) const noexcept {
  int value = 0;
  const CUresult code = driver_.cuDeviceGetAttribute_(&value, attribute, device_);
  if (code == CUDA_SUCCESS) return value;
  if (code != CUDA_ERROR_INVALID_VALUE) {
    try {
      log(LogLevel::warning, fmt::format("device attribute number {} is taken as 0: {}", static_cast<int>(attribute),
                                         driver_error(driver_, code, "cuDeviceGetAttribute").to_string()));
    } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for the text, and nobody to tell
    }
  }
  return 0;
}

}  // namespace metrale::cuda
