// SPDX-License-Identifier: Apache-2.0
//
// Prints why the CUDA backend cannot run here, twice: the second answer is the first. One process for each libcuda, because a
// process finds its driver once.
#include <cstdio>

#include "metrale/backends/cuda.h"

int main() {
  const auto first = metrale::cuda::unavailable();
  const auto second = metrale::cuda::unavailable();
  if (first != second) return std::puts("two answers"), 1;
  std::puts(first ? first->c_str() : "available");
  const auto backend = metrale::cuda::create();
  std::puts(backend ? "created" : backend.error().to_string().c_str());
}
