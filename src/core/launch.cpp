// SPDX-License-Identifier: Apache-2.0
#include "metrale/launch.h"

#include <fmt/format.h>

#include <cstring>

namespace metrale {

Launch& Launch::arg_bytes(std::span<const std::byte> value) noexcept {
  if (value.size() <= sizeof(std::uint64_t)) return push(KernelArg::bytes(value));
  if (value.size() > kStoreBytes - store_used_) {
    overflowed_ = true;
    return *this;
  }
  std::byte* const copy = store_ + store_used_;
  std::memcpy(copy, value.data(), value.size());
  store_used_ += round_up(value.size(), sizeof(std::uint64_t));
  return push(KernelArg::bytes({copy, value.size()}));
}

Launch& Launch::clear_args() noexcept {
  num_args_ = 0;
  store_used_ = 0;
  overflowed_ = false;
  return *this;
}

Result<> Launch::launch(StreamHandle stream, std::source_location site) const {
  if (overflowed_) [[unlikely]] {
    return Error(Errc::invalid_argument,
                 fmt::format("launch of {}: more than {} arguments or {} bytes of them; pass a table in device memory",
                             backend_.kernel_name(kernel_), kMaxKernelArgs, kMaxKernelArgBytes),
                 site);
  }
  return backend_.launch_typed(kernel_, grid_, block_, shared_bytes_, stream, args(), attributes_, site);
}

}  // namespace metrale
