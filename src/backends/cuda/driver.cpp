// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/driver.h"

#include <fmt/format.h>

#include <memory>
#include <mutex>
#include <utility>

#include "backends/cuda/status.h"
#include "core/fault_latch.h"
#include "core/shared_library.h"

namespace metrale::cuda {

namespace {

using GetProcAddress = decltype(&::cuGetProcAddress);

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

Error unavailable_error(std::string why) { return Error(Errc::unsupported, std::move(why)); }

template <class Function>
bool find(GetProcAddress get, const char* name, int version, Function& function) {
  void* address = nullptr;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  const CUresult code = get(name, &address, version, CU_GET_PROC_ADDRESS_DEFAULT, &status);
  if (code != CUDA_SUCCESS || status != CU_GET_PROC_ADDRESS_SUCCESS || address == nullptr) return false;
  function = reinterpret_cast<Function>(address);
  return true;
}

Result<std::unique_ptr<Driver>> load() {
  Result<detail::SharedLibrary> opened = detail::SharedLibrary::open("CUDA driver", kDriverNames);
  if (!opened) return unavailable_error(opened.error().message() + "; install the NVIDIA driver");
  const detail::SharedLibrary library = *opened;
  void* entry = library.find("cuGetProcAddress_v2");
  if (entry == nullptr) {
    return unavailable_error(
        fmt::format("the CUDA driver {} is too old: it has no cuGetProcAddress_v2; install one for CUDA {} or later",
                    library.name(), version_text(kMinimumDriver)));
  }
  const auto get = reinterpret_cast<GetProcAddress>(entry);
  auto driver = std::make_unique<Driver>();
  // What names errors first, so that everything after it can be explained; the version next, so that an old driver is called old
  // rather than incomplete.
  find(get, "cuGetErrorName", 6000, driver->cuGetErrorName_);
  find(get, "cuGetErrorString", 6000, driver->cuGetErrorString_);
  if (find(get, "cuDriverGetVersion", 2020, driver->cuDriverGetVersion_)) {
    static_cast<void>(driver->cuDriverGetVersion_(&driver->version));
    if (driver->version < kMinimumDriver) {
      return unavailable_error(fmt::format("the CUDA driver {} is for CUDA {}; install one for CUDA {} or later", library.name(),
                                           version_text(driver->version), version_text(kMinimumDriver)));
    }
  }
  std::string missing;
#define METRALE_CUDA_FIND(name, version) \
  if (!find(get, #name, version, driver->name##_)) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", #name);
  METRALE_CUDA_REQUIRED(METRALE_CUDA_FIND)
#undef METRALE_CUDA_FIND
  if (!missing.empty()) {
    return unavailable_error(
        fmt::format("the CUDA driver {} for CUDA {} lacks {}", library.name(), version_text(driver->version), missing));
  }
#define METRALE_CUDA_FIND(name, version) find(get, #name, version, driver->name##_);
  METRALE_CUDA_OPTIONAL(METRALE_CUDA_FIND)
#undef METRALE_CUDA_FIND

  if (const CUresult code = driver->cuInit_(0); code != CUDA_SUCCESS) {
    const Error error = driver_error(*driver, code, "cuInit");
    return unavailable_error(fmt::format("the CUDA driver {} does not start: {}", library.name(), error.message()))
        .with_native(error.native_code(), error.native_text());
  }
  int count = 0;
  if (const CUresult code = driver->cuDeviceGetCount_(&count); code != CUDA_SUCCESS) {
    const Error error = driver_error(*driver, code, "cuDeviceGetCount");
    return unavailable_error(fmt::format("the CUDA driver {} cannot tell its devices: {}", library.name(), error.message()))
        .with_native(error.native_code(), error.native_text());
  }
  if (count == 0) return unavailable_error(fmt::format("the CUDA driver {} has no device", library.name()));
  return driver;
}

/// The first answer, and in which process it was given.
struct Loaded {
  std::once_flag once;
  unsigned at_fork = 0;
  Result<const Driver*> answer = nullptr;
};

Loaded& loaded() {
  // Never destroyed: backends in static objects may be released after everything static here.
  static Loaded& instance = *new Loaded;
  return instance;
}

}  // namespace

Result<const Driver*> load_driver() {
  Loaded& state = loaded();
  std::call_once(state.once, [&] {
    state.at_fork = detail::fork_count();
    Result<std::unique_ptr<Driver>> made = load();
    if (made) {
      state.answer = made->release();
    } else {
      state.answer = std::move(made).error();
    }
  });
  if (state.answer && state.at_fork != detail::fork_count()) {
    return unavailable_error("this process was forked after the CUDA driver had been started; the driver does not work here");
  }
  return state.answer;
}

std::string uuid_text(const CUuuid& uuid) {
  std::string text;
  for (std::size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

}  // namespace metrale::cuda
