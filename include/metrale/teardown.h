// SPDX-License-Identifier: Apache-2.0
//
// Teardown: unloads a model in order and says what came back. Made before the model's first allocation, it takes each resource as
// it is made and releases them newest first. It holds the backend by reference. One thread at a time; while it runs nothing else
// allocates or frees on the backend, or the figures of the receipt mix.
#pragma once

#include <cstdint>
#include <memory>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/alloc_ledger.h"
#include "metrale/backend.h"
#include "metrale/model_resource.h"
#include "metrale/result.h"

namespace metrale {

/// What an unload gave back. Bytes are those of blocks that the backend handed out and frees: device, managed, pooled, arena and
/// pinned memory; registered and adopted memory and module globals belong to others and are left out.
struct Receipt {
  /// One step. Its blocks are those on the ledger before the step and not after it.
  struct Line {
    std::string label;
    std::uint64_t bytes = 0;
    std::uint64_t blocks = 0;
    std::string failure;  ///< Empty when the step succeeded.
  };
  /// In the order of release; one label may have several lines. "op scratch" is the backend's own cache.
  std::vector<Line> lines;
  /// What no resource gave back and the sweep found. More than 0 is a leak.
  std::uint64_t swept_blocks = 0;
  std::uint64_t swept_bytes = 0;
  /// Dropped without being freed since the Teardown was made, because the device was lost.
  std::uint64_t abandoned_bytes = 0;
  /// What the ledger holds now, less what it held when the Teardown was made. Above 0: something is still held. Below 0: the sweep
  /// took memory that was there before the model.
  std::int64_t balance_bytes = 0;
  std::int64_t balance_blocks = 0;

  /// Bytes that the lines gave back together.
  std::uint64_t released_bytes() const noexcept;
  bool balanced() const noexcept { return balance_bytes == 0 && balance_blocks == 0; }
  /// Balanced, nothing swept, nothing abandoned, no step failed.
  bool clean() const noexcept;
  /// A line for each step, then sweep, abandoned bytes and balance.
  std::string to_string() const;
};

/// How far an unload goes.
enum class TeardownExtent : std::uint8_t {
  backend,  ///< The resources, the op cache, the sweep, the modules: the backend serves one model.
  model,    ///< The resources only: other models live on the backend.
};

class Teardown {
 public:
  /// Remembers what the ledger holds now.
  explicit Teardown(GpuBackend& backend, TeardownExtent extent = TeardownExtent::backend);
  Teardown(const Teardown&) = delete;
  Teardown& operator=(const Teardown&) = delete;
  /// Runs if `run` was never called, and logs the receipt when it is not clean.
  ~Teardown();

  /// Takes a resource over; it is destroyed after its release.
  void add(std::unique_ptr<ModelResource> resource);
  /// Registers a resource that someone else owns and keeps alive until `run` returns.
  void add(ModelResource& resource);

  /// Releases every resource, newest first, going on after failures. For the whole backend then destroys leftover graphs, releases
  /// what answered in_use once more, releases the op cache, sweeps and unloads the modules. The set is empty afterwards; running
  /// again finds nothing to release.
  /// Ordering: waits for work in flight that uses the memory. Not legal on a thread that holds a capture: each step then fails.
  /// Errors: in the receipt, each with its label; resources that fail keep their memory, which the sweep then takes.
  Receipt run();

 private:
  struct Entry {
    ModelResource* resource;
    std::unique_ptr<ModelResource> owned;
  };
  // Blocks of ours on the ledger now.
  std::vector<Allocation> held_blocks() const;

  GpuBackend& backend_;
  TeardownExtent extent_;
  std::uint64_t baseline_bytes_ = 0;
  std::uint64_t baseline_blocks_ = 0;
  std::uint64_t abandoned_before_ = 0;
  std::vector<Entry> entries_;
  bool ran_ = false;
};

}  // namespace metrale
