// SPDX-License-Identifier: Apache-2.0
//
// redzone_cost launch|alloc COUNT: so many launches of 8 arguments, or pairs of alloc and free, through the face with red zones
// off, over hooks that do nothing. redzone_cost.sh counts their instructions.
#include <cstdio>
#include <string_view>

#include "null_backend.h"

namespace metrale {
namespace {

constexpr std::uint64_t kBlockBytes = 4'096;

int run(std::string_view what, unsigned long count) {
  benchmarks::NullBackend backend;
  const KernelHandle kernel = benchmarks::take(backend.kernel("bench", "nop8"));
  const DevicePtr ptr = benchmarks::take(backend.alloc(kBlockBytes));
  const auto args = benchmarks::eight_args(ptr);
  const StreamHandle stream = backend.default_stream();
  for (unsigned long i = 0; i < count; ++i) {
    if (what == "launch") {
      if (!backend.launch_typed(kernel, {64}, {256}, 0, stream, args)) return 1;
    } else if (!backend.free(benchmarks::take(backend.alloc(kBlockBytes)))) {
      return 1;
    }
  }
  return backend.free(ptr) ? 0 : 1;
}

}  // namespace
}  // namespace metrale

int main(int argc, char** argv) {
  const std::string_view what = argc == 3 ? argv[1] : "";
  if (what != "launch" && what != "alloc") {
    std::fprintf(stderr, "usage: redzone_cost launch|alloc COUNT\n");
    return 2;
  }
  return metrale::run(what, std::strtoul(argv[2], nullptr, 10));
}
