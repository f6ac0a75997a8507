// SPDX-License-Identifier: Apache-2.0
//
// Which instruction set this machine runs.
#include "matmul.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace metrale::host::matmul {

std::string_view to_string(Isa isa) noexcept {
  switch (isa) {
    case Isa::generic: return "generic";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::amx: return "amx";
  }
  return "unknown";
}

#if defined(__x86_64__)
namespace {

struct Features {
  bool avx2, avx512, amx;
};

Features detect() noexcept {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return {};
  const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, f16c = c >> 29 & 1;
  unsigned b7, c7, d7;
  if (!osxsave || !__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return {};
  unsigned enabled, high;
  asm volatile("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));
  const bool ymm = (enabled & 0x6) == 0x6, zmm = (enabled & 0xe6) == 0xe6, tiles = (enabled & 0x60000) == 0x60000;
  Features f{};
  f.avx2 = ymm && fma && f16c && (b7 >> 5 & 1);
  // F, DQ, BW, VL and VNNI
  f.avx512 = f.avx2 && zmm && (b7 >> 16 & 1) && (b7 >> 17 & 1) && (b7 >> 30 & 1) && (b7 >> 31 & 1) && (c7 >> 11 & 1);
  // AMX-BF16 and AMX-TILE
  f.amx = f.avx512 && tiles && (d7 >> 22 & 1) && (d7 >> 24 & 1);
  return f;
}

bool request_tiles() noexcept {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

Isa select_isa(Isa limit) noexcept {
  const Features f = detect();
  if (limit >= Isa::amx && f.amx && request_tiles()) return Isa::amx;
  if (limit >= Isa::avx512 && f.avx512) return Isa::avx512;
  if (limit >= Isa::avx2 && f.avx2) return Isa::avx2;
  return Isa::generic;
}
#else
Isa select_isa(Isa) noexcept { return Isa::generic; }
#endif

}  // namespace metrale::host::matmul
