// SPDX-License-Identifier: Apache-2.0
//
// OpCache: what operations keep between calls, one for each backend: kernel handles with their facts, and scratch memory by
// operation and stream. It belongs to its backend, which releases it at shutdown; `Teardown` does so earlier. Any thread may call;
// one key's scratch is used by one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <source_location>
#include <string_view>

#include "metrale/kernel_registry.h"
#include "metrale/model_resource.h"
#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale {

class GpuBackend;

class OpCache final : public ModelResource {
 public:
  /// Asks nothing of `backend` before the first use.
  explicit OpCache(GpuBackend& backend);
  OpCache(const OpCache&) = delete;
  OpCache& operator=(const OpCache&) = delete;
  /// Does not reach the backend: what was not released is left to the sweep.
  ~OpCache() override;

  /// A kernel and what it publishes.
  struct Kernel {
    KernelHandle handle;
    const KernelFacts* facts = nullptr;  ///< Valid until modules are unloaded.
  };
  /// Finds a kernel, and remembers it: later calls take a read lock and no allocation, and are not in the audit. A miss is not
  /// remembered.
  /// Lifetime: until modules are unloaded. Errors: as `GpuBackend::kernel` and `kernel_facts`.
  Result<Kernel> kernel(std::string_view module, std::string_view function,
                        std::source_location site = std::source_location::current());
  /// Forgets every kernel; a look-up that is under way on another thread is not remembered. `GpuBackend::unload_modules` calls it
  /// on the backend's own cache.
  void forget_kernels();

  /// Scratch memory of at least `bytes` for operation `tag` on `stream`. Grows and never shrinks; contents are kept while the
  /// pointer stays the same and are unspecified after growth.
  /// Ordering: for work on `stream` only. A block that was outgrown is given back once the work on `stream` so far is done and no
  ///   graph names it: looked after at each growth, at `collect` and at release, without waiting.
  /// Lifetime: the pointer is valid for the caller until the key's next request, and for graphs that captured it as long as they
  ///   live.
  /// Errors: invalid_argument (0 bytes; a null stream or, when it grows, one that is not live), capture_unsafe (growth while
  ///   `stream` is captured, or on a thread that holds a capture: ask for the largest size once before capturing), otherwise as
  ///   `GpuBackend::alloc`. The old block stays on failure.
  Result<DevicePtr> scratch(std::string_view tag, StreamHandle stream, std::uint64_t bytes,
                            std::source_location site = std::source_location::current());
  /// Outgrows every block of `stream`, which is about to be destroyed.
  /// Errors: as `scratch` for recording the stream's work; the block of that key stays.
  Result<> retire_stream(StreamHandle stream, std::source_location site = std::source_location::current());
  /// Gives back outgrown blocks whose time has come, and returns how many are left. Legal at any time; during a capture does
  /// nothing.
  std::uint64_t collect();
  /// Forgets every block without freeing it: `GpuBackend::sweep_unreleased` does, before it frees them as it frees all.
  void forget_scratch();

  /// Scratch bytes held, outgrown blocks included.
  std::uint64_t scratch_bytes() const;

  std::string_view label() const noexcept override { return "op scratch"; }
  /// Frees all scratch, outgrown blocks too, and forgets the kernels. Goes on after failures; blocks that a graph names are kept
  /// for the next call. Errors: the first; invalid_argument (another backend: nothing is done).
  Result<> release(GpuBackend& backend) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace metrale
