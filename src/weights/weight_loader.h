// SPDX-License-Identifier: Apache-2.0
//
// The load pipeline of WeightStore: a plan cut into sequential reads, and two staging buffers, so that one part travels to the
// device while the next is read.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "metrale/result.h"
#include "metrale/types.h"
#include "metrale/weight_file.h"
#include "metrale/weight_plan.h"
#include "metrale/weight_store.h"

namespace metrale::weights {

/// Bytes of one entry that pass through staging together.
struct LoadPiece {
  std::size_t entry = 0;        ///< Index into the plan's entries.
  std::uint64_t first_row = 0;  ///< For the transform.
  std::uint64_t in_offset = 0;  ///< Of the source bytes, from the start of the read.
  std::uint64_t in_bytes = 0;
  std::uint64_t out_offset = 0;  ///< Of the result, in the result buffer; unused without a transform.
  std::uint64_t dst_offset = 0;  ///< Of the result, in the tensor on the device.
  std::uint64_t dst_bytes = 0;
};

/// One sequential read of one file, and what is in it.
struct LoadRead {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;  ///< In the file.
  std::uint64_t bytes = 0;
  std::uint64_t out_bytes = 0;  ///< Results of transforms.
  std::vector<LoadPiece> pieces;
};

/// Cuts the plan, whose entries are in file order, into reads of at most `staging_bytes`, or one granule of rows where that is
/// more. Every byte of every entry is read once; small gaps between tensors are read along. Offsets rise in each file.
std::vector<LoadRead> cut_into_reads(const WeightPlan& plan, std::uint64_t staging_bytes);

/// Where each entry of the plan lies on the device.
using EntryAddress = std::function<DevicePtr(const WeightPlan::Entry&)>;

/// Carries out the reads and copies. When it returns, on success and on failure, no copy is under way and staging is given back.
Result<> run_reads(GpuBackend& backend, const WeightFile& file, const WeightPlan& plan, std::span<const LoadRead> reads,
                   const EntryAddress& address, const WeightLoadOptions& options, WeightLoadStats& stats,
                   std::source_location site);

}  // namespace metrale::weights
