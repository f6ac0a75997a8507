// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/image.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string_view>

#include <fmt/format.h>

namespace metrale::cuda {
namespace {

// A fat binary is a header and entries, each a header and its bytes, as fatbinary of CUDA 13.0 writes them.
constexpr std::uint32_t kFatbinMagic = 0xBA55ED50;
constexpr std::size_t kFatbinHeader = 16;        // u32 magic, u16 version, u16 header bytes, u64 bytes that follow it
constexpr std::size_t kEntryHeader = 0x30;       // the part that is read here
constexpr std::size_t kEntryHeaderBytes = 0x04;  // u32
constexpr std::size_t kEntryBytes = 0x08;        // u64, after the entry's header
constexpr std::size_t kEntrySm = 0x1C;           // u32
constexpr std::size_t kEntryFlags = 0x28;        // u64
constexpr std::uint64_t kFlagExact = 0x100000;
constexpr std::uint64_t kFlagFamily = 0x200000;
constexpr std::uint16_t kKindPtx = 1;
constexpr std::uint16_t kKindElf = 2;

constexpr std::size_t kElfMachine = 18;  // u16
constexpr std::size_t kElfAbi = 8;       // u8
constexpr std::size_t kElfFlags = 48;    // u32
constexpr std::uint16_t kMachineCuda = 190;

template <class T>
T read(std::span<const std::byte> bytes, std::size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

std::optional<std::vector<ImageCode>> codes_of_fatbin(std::span<const std::byte> image) {
  const std::size_t header = read<std::uint16_t>(image, 6);
  const auto bytes = read<std::uint64_t>(image, 8);
  if (header < kFatbinHeader || header > image.size() || bytes > image.size() - header) return std::nullopt;
  std::vector<ImageCode> codes;
  std::span<const std::byte> rest = image.subspan(header, bytes);
  while (!rest.empty()) {
    if (rest.size() < kEntryHeader) return std::nullopt;
    const std::uint64_t entry_header = read<std::uint32_t>(rest, kEntryHeaderBytes);
    const auto entry_bytes = read<std::uint64_t>(rest, kEntryBytes);
    if (entry_header < kEntryHeader || entry_header > rest.size() || entry_bytes > rest.size() - entry_header) return std::nullopt;
    const auto kind = read<std::uint16_t>(rest, 0);
    const auto flags = read<std::uint64_t>(rest, kEntryFlags);
    if (kind == kKindPtx || kind == kKindElf) {
      const char variant = (flags & kFlagExact) != 0 ? 'a' : (flags & kFlagFamily) != 0 ? 'f' : '\0';
      codes.push_back({.is_ptx = kind == kKindPtx, .sm = read<std::uint32_t>(rest, kEntrySm), .variant = variant});
    }
    rest = rest.subspan(entry_header + entry_bytes);
  }
  return codes;
}

std::optional<std::vector<ImageCode>> codes_of_cubin(std::span<const std::byte> image) {
  if (image.size() < 64 || read<std::uint16_t>(image, kElfMachine) != kMachineCuda) return std::nullopt;
  const auto abi = read<std::uint8_t>(image, kElfAbi);
  const auto flags = read<std::uint32_t>(image, kElfFlags);
  // As of the ABI of CUDA 13 the number is in the second byte; before, in the first.
  const unsigned sm = abi >= 8 ? flags >> 8 & 0xFF : flags & 0xFF;
  return std::vector<ImageCode>{{.is_ptx = false, .sm = sm, .variant = '\0', .variant_known = false}};
}

std::optional<std::vector<ImageCode>> codes_of_ptx(std::string_view text) {
  constexpr std::string_view kTarget = ".target sm_";
  const std::size_t at = text.find(kTarget);
  if (at == std::string_view::npos) return std::nullopt;
  ImageCode code{.is_ptx = true};
  const char* const end = text.data() + text.size();
  const auto [after, error] = std::from_chars(text.data() + at + kTarget.size(), end, code.sm);
  if (error != std::errc()) return std::nullopt;
  if (after != end && (*after == 'a' || *after == 'f')) code.variant = *after;
  return std::vector<ImageCode>{code};
}

}  // namespace

bool is_ptx(std::span<const std::byte> image) noexcept {
  // The driver tells by the first bytes, and so is this: a text, whose directives come near its beginning.
  const std::size_t head = std::min<std::size_t>(image.size(), 4096);
  const std::string_view text(reinterpret_cast<const char*>(image.data()), head);
  return text.find(".version") != std::string_view::npos &&
         std::all_of(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(head, 64)), [](char c) {
           return std::isprint(static_cast<unsigned char>(c)) != 0 || std::isspace(static_cast<unsigned char>(c)) != 0;
         });
}

std::optional<std::vector<ImageCode>> codes_of(std::span<const std::byte> image) {
  if (image.size() >= kFatbinHeader && read<std::uint32_t>(image, 0) == kFatbinMagic) return codes_of_fatbin(image);
  if (image.size() >= 4 && std::memcmp(image.data(), "\177ELF", 4) == 0) return codes_of_cubin(image);
  if (is_ptx(image)) return codes_of_ptx({reinterpret_cast<const char*>(image.data()), image.size()});
  return std::nullopt;
}

bool runs_on(const ImageCode& code, int major, int minor) noexcept {
  const auto device = static_cast<unsigned>(major * 10 + minor);
  if (code.variant == 'a') return code.sm == device;
  const bool same_family = code.sm / 10 == static_cast<unsigned>(major) && code.sm <= device;
  return code.is_ptx && code.variant == '\0' ? code.sm <= device : same_family;
}

std::string describe(std::span<const ImageCode> codes) {
  std::string text;
  for (const ImageCode& code : codes) {
    text += fmt::format("{}{}sm_{}", text.empty() ? "" : ", ", code.is_ptx ? "PTX for " : "", code.sm);
    if (code.variant != '\0') text += code.variant;
  }
  return text.empty() ? "nothing" : text;
}

}  // namespace metrale::cuda
