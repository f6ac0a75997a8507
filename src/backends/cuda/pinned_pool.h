// SPDX-License-Identifier: Apache-2.0
//
// Page-locked host memory in slabs: registering pages costs half a millisecond a MiB, so a slab is made once and parts of it go
// round. A part is free again the moment it is given back; who gives it back has waited for its work. Any thread.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "backends/cuda/driver.h"
#include "metrale/result.h"

namespace metrale::cuda {

class PinnedPool {
 public:
  explicit PinnedPool(const Driver& driver) : driver_(driver) {}

  /// A part of at least `bytes`, aligned to kPinnedAlignment, contents unspecified. The context is current.
  Result<void*> take(std::uint64_t bytes);
  /// Needs no driver and no context; does nothing after `close`.
  void give(void* part) noexcept;
  /// Where the device sees a part; nullopt for memory of others. Errors: those of the driver.
  Result<std::optional<std::uint64_t>> alias(const void* part);
  /// Gives empty slabs back to the driver, all but the one to keep. The driver may wait for the device: call when it is idle.
  void trim() noexcept;
  bool has_surplus() const noexcept;
  /// Gives back everything; the work that used it is done. `driver_works` false: forgets it.
  void close(bool driver_works) noexcept;
  std::uint64_t bytes_held() const;

 private:
  struct Slab {
    std::byte* base = nullptr;
    std::uint64_t bytes = 0;
    std::uint64_t used_bytes = 0;
    std::optional<std::uint64_t> alias;
    std::map<std::uint64_t, std::uint64_t> free;  ///< Offset → bytes; neighbours are joined.
    std::map<std::uint64_t, std::uint64_t> used;
  };

  /// From a slab that has room; null when none has.
  void* take_locked(std::uint64_t bytes);
  Slab* slab_of(const void* part);

  const Driver& driver_;
  mutable std::mutex mutex_;
  std::map<const std::byte*, Slab> slabs_;  ///< By base.
  std::uint64_t next_slab_bytes_ = std::uint64_t{2} << 20;
  std::size_t num_empty_ = 0;
  bool is_closed_ = false;
};

}  // namespace metrale::cuda
