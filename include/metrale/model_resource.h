// SPDX-License-Identifier: Apache-2.0
//
// ModelResource: something of a model that holds device memory and can be told to give it back. `Teardown` calls it in order and
// counts what came back.
#pragma once

#include <string_view>

#include "metrale/result.h"

namespace metrale {

class GpuBackend;

class ModelResource {
 public:
  virtual ~ModelResource() = default;

  /// A short noun for receipts: "buffer arena", "kv cache".
  virtual std::string_view label() const noexcept = 0;

  /// Gives back everything it holds on `backend`, the one it was made on. Goes on after a failure and returns the first; calling
  /// again releases only what is left. Threads: one at a time, with no other use of the resource.
  virtual Result<> release(GpuBackend& backend) = 0;

 protected:
  ModelResource() = default;
  ModelResource(const ModelResource&) = default;
  ModelResource& operator=(const ModelResource&) = default;
};

}  // namespace metrale
