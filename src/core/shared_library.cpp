// SPDX-License-Identifier: Apache-2.0
#include "core/shared_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace metrale::detail {

Result<SharedLibrary> SharedLibrary::open(const char* what, std::span<const char* const> names) {
  std::string tried;
  for (const char* name : names) {
    if (void* handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL)) return SharedLibrary(handle, name);
    const char* words = ::dlerror();
    tried += fmt::format("{}{}", tried.empty() ? "" : "; ", words == nullptr ? "the loader gives no reason" : words);
  }
  return Error(Errc::unsupported, fmt::format("no {}: {}", what, tried));
}

void* SharedLibrary::find(const char* function) const noexcept { return ::dlsym(handle_, function); }

}  // namespace metrale::detail
