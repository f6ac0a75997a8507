// SPDX-License-Identifier: Apache-2.0
//
// What a first program with metrale does: makes the host backend, lets bytes travel to device memory and back, and gives it all up.
#include <array>
#include <cstdio>
#include <span>
#include <string>

#include "metrale/metrale.h"

namespace {

metrale::Result<> round_trip(metrale::GpuBackend& backend) {
  const std::array<std::byte, 4> sent{std::byte{4}, std::byte{8}, std::byte{15}, std::byte{16}};
  std::array<std::byte, 4> received{};
  const metrale::DevicePtr block = METRALE_TRY(backend.alloc(sent.size()));
  METRALE_TRY(backend.copy_h2d(block, sent));
  METRALE_TRY(backend.copy_d2h(received, block));
  METRALE_TRY(backend.free(block));
  if (received != sent) return metrale::Error(metrale::Errc::internal, "the bytes that came back are not those that were sent");
  return {};
}

}  // namespace

int main() {
  auto backend = metrale::host::create();
  if (!backend) {
    std::fprintf(stderr, "%s\n", backend.error().to_string().c_str());
    return 1;
  }
  if (auto done = round_trip(**backend); !done) {
    std::fprintf(stderr, "%s\n", done.error().to_string().c_str());
    return 1;
  }
  // From libraries of their own, so that the link needs all that the package names.
  const auto tokenizer = metrale::Tokenizer::from_json("{}", "tokenizer.json");
  std::printf("%s, kernels for %s: 4 bytes there and back, %llu live; an empty tokenizer is %s\n",
              std::string((*backend)->name()).c_str(), std::string(metrale::host::kernel_isa()).c_str(),
              static_cast<unsigned long long>((*backend)->live_bytes()), tokenizer ? "taken" : "refused");
  return (*backend)->live_bytes() == 0 ? 0 : 1;
}
