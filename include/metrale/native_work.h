// SPDX-License-Identifier: Apache-2.0
//
// Work that another library enqueues on one of the backend's streams: what the bridges to vendor libraries are made of.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>

#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale {

/// Memory that native work reads or writes: `bytes` from `ptr`, in one block that the backend knows. `what` is for messages.
struct NativeUse {
  std::string_view what;
  DevicePtr ptr;
  std::uint64_t bytes = 0;
};

/// A callable that enqueues the work on the stream whose driver's handle it is given, and answers what the library said. It refers
/// to the callable and does not keep it; it is called before the call it was given to returns.
class NativeWork {
 public:
  template <class Fn>
    requires(!std::is_same_v<std::remove_cvref_t<Fn>, NativeWork>)
  NativeWork(Fn&& fn) noexcept  // NOLINT(google-explicit-constructor): a lambda is handed over as it is
      : target_(const_cast<void*>(static_cast<const void*>(std::addressof(fn)))),
        call_([](void* target, std::uint64_t native) { return (*static_cast<std::remove_reference_t<Fn>*>(target))(native); }) {}
  Result<> operator()(std::uint64_t native_stream) const { return call_(target_, native_stream); }

 private:
  void* target_;
  Result<> (*call_)(void*, std::uint64_t);
};

}  // namespace metrale
