// SPDX-License-Identifier: Apache-2.0
//
// CudaRawDevice: the raw side on a CUDA driver. It retains the primary context of its device, in which the backend lives too, and
// has a stream, a module and events of its own. See ../raw_device.h for the rules.
#pragma once

#include <cuda.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/driver.h"
#include "bench/cuda/cublaslt.h"
#include "bench/raw_device.h"

namespace metrale::bench {

class CudaRawDevice final : public RawDevice {
 public:
  /// `module`: the image of module "bench", which outlives the call only. Errors: those of the driver.
  static Result<std::unique_ptr<CudaRawDevice>> create(const cuda::Driver& driver, int ordinal, std::span<const std::byte> module);
  CudaRawDevice(const CudaRawDevice&) = delete;
  CudaRawDevice& operator=(const CudaRawDevice&) = delete;
  ~CudaRawDevice() override;

  /// Errors: invalid_argument (the backend is on another device: nothing measured here says anything of it).
  Result<> check_shares_device(const GpuBackend& backend) const;

  std::string device_name() const override { return name_; }
  std::string uuid() const override { return uuid_; }
  int driver_version() const override { return driver_.version; }
  Result<> synchronize() override;

  Result<> launch_nops(std::uint32_t count) override;
  Result<> launch_dependent(std::uint32_t count) override;
  Result<> launch_and_wait(std::uint32_t count) override;

  Result<> alloc_free(std::uint64_t bytes, std::uint32_t count) override;
  Result<> alloc_free_groups(std::uint64_t bytes, std::uint32_t group, std::uint32_t count) override;
  bool has_pool() const noexcept override;
  Result<> open_pool(std::uint32_t streams) override;
  Result<double> pool_ring(std::uint32_t stream, std::span<const std::uint64_t> sizes, std::uint32_t live) override;
  Result<> pinned_alloc_free(std::uint64_t bytes) override;

  Result<std::span<std::byte>> pinned(std::uint64_t bytes) override;
  Result<> to_host(std::span<const RawCopy> copies) override;
  Result<> to_device(std::span<const RawCopy> copies) override;
  Result<> to_host_blocking(std::span<const RawCopy> copies) override;
  Result<double> device_copy_seconds(std::uint64_t dst, std::uint64_t src, std::uint64_t bytes) override;

  Result<std::uint32_t> make_chain(std::uint32_t nodes, std::uint32_t blocks, bool dependent) override;
  Result<std::optional<std::uint32_t>> make_peer(const PeerProduct& product, std::string& why_not) override;
  Result<> launch_graph(std::uint32_t graph, std::uint32_t count) override;
  Result<double> graph_seconds(std::uint32_t graph) override;

  Result<> reset_marks(std::uint32_t capacity) override;
  Result<> hold(std::uint64_t native, std::uint64_t nanoseconds) override;
  Result<> mark(std::uint64_t native) override;
  Result<std::vector<double>> mark_seconds() override;

 private:
  CudaRawDevice(const cuda::Driver& driver, CUdevice device) : driver_(driver), device_(device) {}
  Result<> open(std::span<const std::byte> module);
  Result<> check(CUresult code, std::string_view what) const;
  /// Makes the context current for this thread.
  Result<> enter() const;
  Result<CUfunction> function(const char* name) const;
  Result<CUstream> new_stream() const;
  Result<CUevent> new_event();
  Result<CUdeviceptr> new_memory(std::uint64_t bytes);
  CUlaunchConfig dependent_config(CUlaunchAttribute& attribute, std::uint32_t blocks, bool dependent) const;
  /// Captures what `body` enqueues on the stream.
  template <class Body>
  Result<std::uint32_t> capture(const Body& body);
  /// Device time of what `body` enqueues on the stream.
  template <class Body>
  Result<double> timed(const Body& body);

  const cuda::Driver& driver_;
  CUdevice device_;
  CUcontext context_ = nullptr;
  std::string name_;
  std::string uuid_;
  CUmodule module_ = nullptr;
  CUfunction nop8_ = nullptr;
  CUfunction nop_waits_ = nullptr;
  CUfunction hold_ = nullptr;
  CUstream stream_ = nullptr;
  CUdeviceptr counters_ = 0;
  CUevent start_ = nullptr;
  CUevent end_ = nullptr;
  std::vector<CUstream> pool_streams_;
  CUmemoryPool pool_ = nullptr;
  std::vector<std::pair<CUgraph, CUgraphExec>> graphs_;
  std::unique_ptr<CublasLt> blas_;
  std::vector<CUdeviceptr> memory_;
  std::vector<void*> pinned_;
  std::vector<CUevent> marks_;
  std::size_t num_marks_ = 0;
};

}  // namespace metrale::bench
