// SPDX-License-Identifier: Apache-2.0
//
// Schedules of the tensor-core kernels, which depend on no instance, and what the device is. That of the wgmma kernels is ours,
// in FlashInfer's form.
#include <flashinfer/attention/scheduler.cuh>

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "bridges/flashinfer/guard.cuh"

namespace metrale::fi {
namespace {

__global__ void probe_kernel() {}

}  // namespace

Outcome plan_prefill(const PlanArgs& args, Planned& planned) {
  return guarded([&] {
    ::flashinfer::PrefillPlanInfo info;
    // Only offsets from the begin of the partial results are used.
    void* const pretended = reinterpret_cast<void*>(std::uintptr_t{4096});
    const cudaError_t code = ::flashinfer::PrefillPlan<std::int32_t>(
        pretended, std::size_t{1} << 44, args.ints_device, args.ints_host, args.ints_bytes, info, args.q_indptr, args.kv_indptr,
        args.rows, args.batch, args.num_q_heads, args.num_kv_heads, args.head_dim, args.head_dim, args.page_size, args.under_graph,
        /*sizeof_dtype_o=*/2, args.window_left, /*fixed_split_size=*/-1, /*disable_split_kv=*/false, /*num_colocated_ctas=*/0,
        stream_of(args.stream));
    if (code != cudaSuccess) return code;
    planned.info = info.ToVector();
    planned.partials_bytes =
        info.split_kv ? info.s_offset + std::uint64_t{args.num_q_heads} * info.padded_batch_size * info.cta_tile_q * sizeof(float)
                      : 0;
    return cudaSuccess;
  });
}

Outcome plan_hopper(const PlanArgs& args, Planned& planned) {
  return guarded([&] {
    struct Tile {
      std::int32_t cost, sequence, tile, head;
    };
    const std::int32_t tile_rows = args.head_dim == 64 ? 192 : 128;
    std::vector<Tile> tiles;
    for (std::uint32_t i = 0; i < args.batch; ++i) {
      const std::int32_t queries = args.q_indptr[i + 1] - args.q_indptr[i];
      const std::int32_t keys = args.kv_len[i];
      for (std::int32_t tile = 0; tile * tile_rows < queries; ++tile) {
        const std::int32_t last = args.causal ? std::min(keys - queries + (tile + 1) * tile_rows, keys) : keys;
        const std::int32_t seen = args.window_left < 0 ? last : std::min(last, args.window_left + 1 + tile_rows);
        // Starting and ending a tile takes about as long as a step over keys.
        for (std::uint32_t head = 0; head < args.num_q_heads; ++head) {
          tiles.push_back({seen + 128, static_cast<std::int32_t>(i), tile, static_cast<std::int32_t>(head)});
        }
      }
    }
    // The longest first, each to the processor with the least to do: FlashInfer's own order goes by heads, and leaves processors an
    // eighth more to do than their share where there are some tiles for each.
    std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) { return a.cost > b.cost; });
    int ordinal = 0;
    int num_sms = 0;
    cudaError_t code = cudaGetDevice(&ordinal);
    if (code == cudaSuccess) code = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, ordinal);
    if (code != cudaSuccess) return code;
    using Load = std::pair<std::int64_t, int>;
    std::priority_queue<Load, std::vector<Load>, std::greater<>> least;
    for (int sm = 0; sm < num_sms; ++sm) least.push({0, sm});
    std::vector<std::vector<const Tile*>> work(static_cast<std::size_t>(num_sms));
    for (const Tile& tile : tiles) {
      const auto [load, sm] = least.top();
      least.pop();
      work[static_cast<std::size_t>(sm)].push_back(&tile);
      least.push({load + tile.cost, sm});
    }

    std::size_t room = tiles.size();
    if (args.under_graph) {
      room = ((args.rows + tile_rows - 1) / tile_rows + std::size_t{args.batch} - 1) * args.num_q_heads;
      FLASHINFER_CHECK(tiles.size() <= room, "more tiles than were counted");
    }
    ::flashinfer::PrefillPlanSM90Info info;
    ::flashinfer::AlignedAllocator ints(args.ints_device, args.ints_bytes);
    const auto table = [&](std::int64_t& offset, std::size_t count, const char* name) {
      offset = ints.aligned_alloc_offset(count * sizeof(std::int32_t), 16, name);
      return ::flashinfer::GetPtrFromBaseOffset<std::int32_t>(args.ints_host, offset);
    };
    std::int32_t* const q_tiles = table(info.qo_tile_indices_offset, room, "tiles of queries");
    std::int32_t* const q_begins = table(info.qo_indptr_offset, room, "begins of queries");
    std::int32_t* const kv_begins = table(info.kv_indptr_offset, room, "begins of keys");
    std::int32_t* const q_lengths = table(info.qo_len_offset, room, "lengths of queries");
    std::int32_t* const kv_lengths = table(info.kv_len_offset, room, "lengths of keys");
    std::int32_t* const heads = table(info.head_indices_offset, room, "heads");
    std::int32_t* const sequences = table(info.batch_indices_offset, room, "sequences");
    std::int32_t* const begins = table(info.work_indptr_offset, static_cast<std::size_t>(num_sms) + 1, "work");
    std::size_t at = 0;
    for (int sm = 0; sm < num_sms; ++sm) {
      begins[sm] = static_cast<std::int32_t>(at);
      for (const Tile* tile : work[static_cast<std::size_t>(sm)]) {
        const std::int32_t i = tile->sequence;
        q_tiles[at] = tile->tile;
        q_begins[at] = args.q_indptr[i];
        kv_begins[at] = args.kv_indptr[i];
        q_lengths[at] = args.q_indptr[i + 1] - args.q_indptr[i];
        kv_lengths[at] = args.kv_len[i];
        heads[at] = tile->head;
        sequences[at] = i;
        ++at;
      }
    }
    begins[num_sms] = static_cast<std::int32_t>(at);
    planned.info = info.ToVector();
    planned.partials_bytes = 0;
    return cudaMemcpyAsync(args.ints_device, args.ints_host, ints.num_allocated_bytes(), cudaMemcpyHostToDevice,
                           stream_of(args.stream));
  });
}

Outcome probe(Device& device) {
  return guarded([&] {
    int ordinal = 0;
    cudaFuncAttributes attributes;
    cudaError_t code = cudaGetDevice(&ordinal);
    if (code == cudaSuccess) code = cudaDeviceGetAttribute(&device.major, cudaDevAttrComputeCapabilityMajor, ordinal);
    if (code == cudaSuccess) code = cudaDeviceGetAttribute(&device.minor, cudaDevAttrComputeCapabilityMinor, ordinal);
    if (code == cudaSuccess) code = cudaDeviceGetAttribute(&device.num_sms, cudaDevAttrMultiProcessorCount, ordinal);
    return code == cudaSuccess ? cudaFuncGetAttributes(&attributes, probe_kernel) : code;
  });
}

}  // namespace metrale::fi
