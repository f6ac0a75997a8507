// SPDX-License-Identifier: Apache-2.0
#include "metrale/stream.h"

namespace metrale {
namespace {
Error empty(std::source_location site) { return {Errc::invalid_argument, "this Stream owns nothing; create one first", site}; }
}  // namespace

Result<Stream> Stream::create(GpuBackend& backend, int priority, std::source_location site) {
  return Stream(backend, METRALE_TRY(backend.create_stream(priority, site)));
}

Result<Stream> Stream::wrap(GpuBackend& backend, std::uint64_t native, std::source_location site) {
  return Stream(backend, METRALE_TRY(backend.wrap_stream(native, site)));
}

Result<> Stream::synchronize(std::source_location site) const {
  if (backend() == nullptr) return empty(site);
  return backend()->synchronize(handle(), site);
}

Result<bool> Stream::query(std::source_location site) const {
  if (backend() == nullptr) return empty(site);
  return backend()->query(handle(), site);
}

}  // namespace metrale
