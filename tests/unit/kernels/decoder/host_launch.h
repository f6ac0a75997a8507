// SPDX-License-Identifier: Apache-2.0
//
// Runs a host kernel over a grid without a backend: blocks one after the other, each with fresh shared memory full of a pattern.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "decoder/decoder.h"
#include "matmul/matmul.h"

namespace metrale::host::decoder::testing {

class HostLaunch {
 public:
  explicit HostLaunch(matmul::Isa isa) : kernels_(decoder::kernels(isa)) {}

  const HostKernel& find(std::string_view function) const {
    for (const HostKernel& kernel : kernels_) {
      if (kernel.function == function) return kernel;
    }
    throw std::runtime_error("no such kernel");
  }

  /// Pointers become Buffers, structs go by value. Returns what the kernel put in `fault`.
  template <class... Args>
  std::string run(std::string_view function, Dim3 grid, std::uint32_t shared_bytes, const Args&... args) const {
    const HostKernel& kernel = find(function);
    std::vector<std::vector<std::byte>> storage{pack(args)...};
    std::vector<const void*> params;
    EXPECT_EQ(storage.size(), kernel.param_bytes.size());
    for (std::size_t i = 0; i < storage.size(); ++i) {
      EXPECT_EQ(storage[i].size(), kernel.param_bytes[i]) << function << " argument " << i;
      params.push_back(storage[i].data());
    }
    const char* fault = nullptr;
    for (std::uint32_t z = 0; z < grid.z; ++z) {
      for (std::uint32_t y = 0; y < grid.y; ++y) {
        for (std::uint32_t x = 0; x < grid.x; ++x) {
          std::vector<std::byte> shared(shared_bytes + 64, std::byte{0xa5});
          auto address = reinterpret_cast<std::uintptr_t>(shared.data());
          std::byte* aligned = shared.data() + (64 - address % 64) % 64;
          kernel.fn({.grid = grid,
                     .block = {},
                     .index = {x, y, z},
                     .shared = {aligned, shared_bytes},
                     .params = params.data(),
                     .fault = &fault});
        }
      }
    }
    return fault ? fault : "";
  }

 private:
  template <class T>
  static std::vector<std::byte> pack(const T& value) {
    std::vector<std::byte> bytes(sizeof(T));
    std::memcpy(bytes.data(), &value, sizeof(T));
    return bytes;
  }
  std::span<const HostKernel> kernels_;
};

/// Every instruction set that this machine runs.
inline std::vector<matmul::Isa> all_isas() {
  std::vector<matmul::Isa> isas;
  for (const auto isa : {matmul::Isa::generic, matmul::Isa::avx2, matmul::Isa::avx512}) {
    if (matmul::select_isa(isa) == isa) isas.push_back(isa);
  }
  return isas;
}

inline std::vector<float> random_floats(std::size_t n, std::uint32_t seed, float scale = 1.0F) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-scale, scale);
  std::vector<float> values(n);
  for (float& x : values) x = uniform(random);
  return values;
}

inline float from_bf16(std::uint16_t bits) {
  const std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
  float x = 0;
  std::memcpy(&x, &word, 4);
  return x;
}
inline std::uint16_t to_bf16(float x) {
  std::uint32_t word = 0;
  std::memcpy(&word, &x, 4);
  return static_cast<std::uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

class EachIsa : public ::testing::TestWithParam<matmul::Isa> {
 protected:
  HostLaunch launch{GetParam()};
};
inline std::string isa_name(const ::testing::TestParamInfo<matmul::Isa>& info) {
  return std::string(matmul::to_string(info.param));
}

}  // namespace metrale::host::decoder::testing
