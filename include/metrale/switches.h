// SPDX-License-Identifier: Apache-2.0
//
// Every environment switch of metrale: read once, in one file, on first use, and listed by `metgpu info`. Only the values shown in
// a switch's comment arm it. Set-once switches may also be published by the program before their first read; the first published
// value or the first read wins. Any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace metrale {

struct Switches {
  std::uint64_t redzone_bytes = 0;    ///< METRALE_REDZONE: guard band after each block, rounded up to 16.
  std::uint8_t redzone_fill = 0xEE;   ///< METRALE_REDZONE_FILL: decimal byte.
  std::uint64_t redzone_min_idx = 0;  ///< METRALE_REDZONE_MIN_IDX: guard only blocks with this creation index or later.
  std::optional<std::uint64_t> redzone_trace_idx;  ///< METRALE_REDZONE_TRACE_IDX: log the caller of this allocation.
  bool unchecked = false;                          ///< METRALE_UNCHECKED=1: copies skip the check of their ends.
  bool debug_sync_kernels = false;                 ///< METRALE_DEBUG_SYNC_KERNELS=1: wait after each launch.
  bool kv_poison = false;                          ///< METRALE_KV_POISON=1: freed KV blocks are filled with NaN.
  bool kv_trace = false;                           ///< METRALE_KV_TRACE=1: keep each KV block's reference history.
  bool ssm_tail_ckpt = false;                      ///< METRALE_SSM_TAIL_CKPT=1: end a prefill chunk at the last block boundary.
  std::string host_isa;                            ///< METRALE_HOST_ISA=generic|avx2|avx512|amx: cap on host instructions.
  std::uint32_t host_threads = 0;                  ///< METRALE_HOST_THREADS: threads of the host backend; 0: one a core.
  std::uint32_t cuda_device = 0;                   ///< METRALE_CUDA_DEVICE: the device that "cuda" means, as the driver counts.
  std::string kernel_path;     ///< METRALE_KERNEL_PATH: folder of CUDA modules that replace or add to those built in.
  std::string cublaslt_cache;  ///< METRALE_CUBLASLT_CACHE: folder of the algorithms that the cuBLASLt bridge has measured.
  std::string rendezvous;  ///< METRALE_RENDEZVOUS=tcp://host:port|file:///path: where processes of one start meet (rendezvous.h).
};

/// The environment as it was at the first call.
const Switches& switches();

/// One line of `metgpu info`.
struct SwitchReport {
  std::string_view name;
  std::string_view summary;
  std::string value;
  std::string_view source;  ///< "default", "environment", "program", or "environment, ignored" for a value that arms nothing.
};
std::vector<SwitchReport> switch_report();

/// Keep a prefill chunk whole and split only the recurrence at the boundary. On; off by METRALE_SSM_TAIL_MIDCHUNK=0 or by the
/// program. Set once: an absent value publishes nothing. For engines that snapshot recurrent state; the reference decoders keep
/// no snapshots.
void set_ssm_tail_midchunk(std::optional<bool> value);
bool ssm_tail_midchunk();

/// Never restore another request's state. Off; on by METRALE_HERMETIC=1 or by the program. Set once: only `true` is published.
/// The reference decoders restore none in any case.
void set_hermetic(bool value);
bool hermetic();

/// Last multiple of `block` tokens strictly below `total` tokens; none when `block` is 0 or `total` <= `block`.
std::optional<std::uint64_t> ssm_tail_boundary(std::uint64_t total, std::uint64_t block) noexcept;

}  // namespace metrale
