// SPDX-License-Identifier: Apache-2.0
//
// In place of the bridge where nccl.h was not there when metrale was built.
#include "bridges/nccl/check.h"

namespace metrale::nccl {
namespace {

constexpr const char* kWhy =
    "this build has no NCCL bridge; build with METRALE_WITH_CUDA and METRALE_WITH_NCCL, and METRALE_NCCL_INCLUDE_DIR where nccl.h "
    "is";

Error left_out(std::source_location site) { return Error(Errc::unsupported, kWhy, site); }

}  // namespace

BridgeStatus status() { return {.library = "NCCL", .is_available = false, .text = kWhy}; }

Result<UniqueId> make_unique_id() { return left_out(std::source_location::current()); }

Result<std::unique_ptr<Communicator>> create(GpuBackend& backend, const UniqueId&, std::uint32_t rank, std::uint32_t size,
                                             const Options& options, std::source_location site) {
  METRALE_TRY(check_rank(rank, size, options, site));
  METRALE_TRY(check_backend(backend, site));
  return left_out(site);
}

Result<std::vector<std::unique_ptr<Communicator>>> create_all(std::span<GpuBackend* const> backends, const Options& options,
                                                              std::source_location site) {
  METRALE_TRY(check_world(backends, options, site));
  return left_out(site);
}

Result<std::unique_ptr<Communicator>> join(GpuBackend& backend, const ProcessPlace& place, const Options& options,
                                           std::source_location site) {
  METRALE_TRY(check_rank(place.rank, place.size, options, site));
  METRALE_TRY(check_backend(backend, site));
  return left_out(site);
}

std::uint64_t residual_bytes(const Communicator&) noexcept { return 0; }

}  // namespace metrale::nccl
