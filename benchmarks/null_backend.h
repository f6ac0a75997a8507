// SPDX-License-Identifier: Apache-2.0
//
// A backend whose hooks do nothing, so that what is measured is the face; and what benchmarks of the face share.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "metrale/backend.h"

namespace metrale::benchmarks {

/// The value, or the end of the program.
template <class T>
T take(Result<T> result) {
  if (!result) std::abort();
  return std::move(*result);
}

inline FaceOptions bare_face() {
  FaceOptions face;
  face.redzone_bytes = 0;
  face.debug_sync_kernels = false;
  face.unchecked_copies = false;
  face.flight_recorder = false;
  return face;
}

/// Hooks that do nothing at once, so that what is measured is the face.
class NullBackend final : public GpuBackend {
 public:
  NullBackend() : GpuBackend(bare_face()) {
    if (!initialize()) std::abort();
  }
  ~NullBackend() override { shutdown_from_destructor(); }

 protected:
  std::string_view do_name() const noexcept override { return "null"; }
  std::string do_device_key() const override { return "null"; }
  Capabilities do_capabilities() const override {
    Capabilities all;
    for (std::size_t i = 0; i < kNumCapabilities; ++i) all.add(static_cast<Capability>(i));
    return all;
  }
  Result<DevicePtr> do_alloc(std::uint64_t bytes, MemoryKind) override {
    const DevicePtr base{next_};
    next_ += round_up(bytes, kDeviceAlignment);
    return base;
  }
  Result<> do_free(DevicePtr, std::uint64_t, MemoryKind) override { return {}; }
  Result<NativeStream> do_create_stream(int) override { return NativeStream{1}; }
  Result<> do_destroy_stream(NativeStream) override { return {}; }
  Result<> do_synchronize_device() override { return {}; }
  Result<> do_copy_d2d_async(DevicePtr, DevicePtr, std::uint64_t, NativeStream) override { return {}; }
  Result<NativeKernel> do_find_kernel(std::string_view, std::string_view) override { return NativeKernel{1}; }
  Result<KernelFacts> do_kernel_facts(NativeKernel) override { return KernelFacts{.param_bytes = {8, 8, 8, 8, 4, 4, 4, 4}}; }
  Result<> do_launch(const LaunchDesc&) override { return {}; }

 private:
  std::uint64_t next_ = 0x1000'0000;
};

/// Four buffers and four words.
inline std::array<KernelArg, 8> eight_args(DevicePtr ptr) {
  const auto buffer = KernelArg::buffer(ptr);
  const auto word = KernelArg::value(std::uint32_t{1});
  return {buffer, buffer, buffer, buffer, word, word, word, word};
}

}  // namespace metrale::benchmarks
