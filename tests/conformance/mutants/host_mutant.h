// SPDX-License-Identifier: Apache-2.0
//
// What mutants of the host backend are made with.
#pragma once

#include <cstring>
#include <string_view>

#include "backends/host/host_backend.h"
#include "conformance/backends/options.h"
#include "conformance/mutants/mutants.h"

namespace metrale::conformance {

/// The host backend, with what several mutants need to break it.
class HostMutant : public host::HostBackend {
 public:
  using HostBackend::HostBackend;

 protected:
  Result<NativeStream> do_create_stream(int priority) override {
    const NativeStream made = METRALE_TRY(HostBackend::do_create_stream(priority));
    if (first_stream_.value == 0) first_stream_ = made;
    return made;
  }
  /// The backend's default stream: the first that was made.
  NativeStream first_stream() const { return first_stream_; }
  static std::byte* bytes_at(DevicePtr ptr) { return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(ptr.address)); }
  bool capturing(NativeStream stream) { return HostBackend::do_stream_is_capturing(stream).value_or(true); }

 private:
  NativeStream first_stream_;
};

/// Fresh memory is zero.
class AllocZeroes : public HostMutant {
  using HostMutant::HostMutant;
  Result<DevicePtr> do_alloc(std::uint64_t bytes, MemoryKind kind) override {
    const DevicePtr ptr = METRALE_TRY(HostMutant::do_alloc(bytes, kind));
    std::memset(bytes_at(ptr), 0, bytes);
    return ptr;
  }
};

/// A mutant made of class `T`.
template <class T>
Mutant host_mutant(std::string_view name, std::string_view caught_by) {
  return {name, caught_by, [](const CreateOptions& options) { return host::HostBackend::make<T>(host_options(options)); }};
}

}  // namespace metrale::conformance
