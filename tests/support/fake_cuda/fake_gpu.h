// SPDX-License-Identifier: Apache-2.0
//
// A CUDA driver without a GPU: a `cuda::Driver` filled with host functions that keep the real driver's rules, so that the real
// backend runs where no device is. Device memory is host memory, streams are threads, kernels are C++ functions. What the real
// driver would crash on (a handle that was destroyed, a second free) is answered with an error and noted as a misuse.
//
// Stricter than the driver where that finds faults: handles and blocks are never known again once given back, copies must stay
// inside one block, contents of fresh memory are not zero.
//
// One FakeGpu is alive at a time, because the functions of a driver have no argument to tell fakes apart; it outlives the backends
// that use it. Any thread.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backends/cuda/driver.h"
#include "metrale/backends/cuda.h"
#include "metrale/backends/host_kernel.h"

namespace metrale::fake_cuda {

struct State;

struct DeviceOptions {
  std::string name = "Fake GPU";
  std::uint64_t total_bytes = std::uint64_t{8} << 30;
  int compute_capability = 90;  ///< As in sm_90.
  int num_multiprocessors = 4;
  bool integrated = false;
  bool managed_memory = true;
  bool reaches_peers = true;  ///< By address; without it the driver stages copies between devices.
};

struct Options {
  std::vector<DeviceOptions> devices = std::vector<DeviceOptions>(1);
  int driver_version = 13000;
  /// Copies, fills and kernels run in the caller when their stream is idle. Fast; finds fewer faults of order.
  bool runs_when_idle = false;
  /// A stream that an event wait took into a capture must be joined back even where no work was recorded on it.
  bool idle_forks_count = false;
  /// Kernel nodes name a CUkernel, as those of libraries do, instead of a CUfunction.
  bool nodes_have_kernels = false;
  /// `test::fail_allocation` (support/failing_heap.h) where a test makes allocations fail: those of the driver itself do not.
  std::int64_t (*fail_allocation)(std::int64_t n) noexcept = nullptr;
};

/// What was made through the driver and not given back.
struct Live {
  std::size_t contexts = 0;  ///< Retains of primary contexts.
  std::size_t blocks = 0;    ///< Device, managed and pinned.
  std::size_t registrations = 0;
  std::size_t streams = 0;
  std::size_t events = 0;
  std::size_t graphs = 0;
  std::size_t graph_execs = 0;
  std::size_t user_objects = 0;
  std::size_t modules = 0;
  std::size_t log_callbacks = 0;  ///< Not in the total: who listens does so for the life of the process.
  std::uint64_t bytes = 0;        ///< Of the blocks.

  std::size_t total() const {
    return contexts + blocks + registrations + streams + events + graphs + graph_execs + user_objects + modules;
  }
  std::string to_string() const;
};

/// A global of a fake module.
struct Global {
  std::string_view name;
  std::uint64_t bytes = 0;
  std::uint64_t value = 0;  ///< Its first bytes, little-endian.
};

class FakeGpu {
 public:
  explicit FakeGpu(Options options = {});
  /// Work that still runs completes first.
  ~FakeGpu();
  FakeGpu(const FakeGpu&) = delete;
  FakeGpu& operator=(const FakeGpu&) = delete;

  /// The table. Lives as long as the process, as those of real drivers, and no other fake has it.
  const cuda::Driver& driver() const noexcept { return driver_; }
  /// The table without these optional functions.
  cuda::Driver driver_without(std::initializer_list<std::string_view> functions) const;

  /// Makes an image of `kernels`, all of `module`, with the facts they publish as globals. The kernels' functions run when it is
  /// launched. The image lives as long as this.
  cuda::ModuleImage add_module(std::string_view module, std::span<const host::HostKernel> kernels,
                               std::span<const Global> globals = {}, int architecture = 80);
  /// Only the functions, for images from elsewhere.
  void register_kernels(std::span<const host::HostKernel> kernels);

  // ---- calls ----
  /// Calls through the table so far.
  std::uint64_t num_calls() const;
  std::uint64_t num_calls(std::string_view function) const;
  /// Starts counting again.
  void reset_counts();
  /// The `nth` call from now (1: the next) answers `code` and does nothing. A sticky code stays with the context.
  void fail_call(std::uint64_t nth, CUresult code);
  /// The `nth` call of `function` from now answers `code`.
  void fail_call(std::string_view function, std::uint64_t nth, CUresult code);
  void clear_failures();
  /// The function whose call was failed last; empty: none.
  std::string failed_function() const;

  // ---- state ----
  Live live() const;
  /// What was left in primary contexts when their last retains were released since this was asked last, in words.
  std::vector<std::string> dropped_with_context();
  /// Calls that would crash or do harm on a real driver.
  std::vector<std::string> misuses() const;
  /// Kernels that were loaded by their first launch.
  std::uint64_t num_lazy_loads() const;
  /// As the driver counts them, of the streams that are alive, oldest first.
  std::vector<int> stream_priorities() const;
  /// Retains of the primary context of `device`.
  int num_retains(int device = 0) const;
  void set_total_memory(std::uint64_t bytes, int device = 0);
  /// Loses the context of `device` as a faulting kernel does.
  void lose(CUresult code = CUDA_ERROR_ILLEGAL_ADDRESS, int device = 0);
  /// A lost device works again, as in a new process.
  void forget_faults();
  /// Memory of the device that no call of the table gave out; lives as long as this.
  CUdeviceptr foreign_memory(std::uint64_t bytes);

 private:
  std::unique_ptr<State> state_;
  const cuda::Driver& driver_;
};

/// Whether the context is lost after `code`.
bool is_sticky(CUresult code) noexcept;

}  // namespace metrale::fake_cuda
