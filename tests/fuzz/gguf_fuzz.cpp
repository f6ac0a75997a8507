// SPDX-License-Identifier: Apache-2.0
#include "metrale/gguf.h"

#include "fuzz/check_table.h"

namespace {

using namespace metrale;

void check_metadata(const GgufMetadata& metadata) {
  for (const auto& [key, value] : metadata.values()) {
    fuzz::require(metadata.find(key) == &value, "each key leads to its value");
    fuzz::require(!gguf_type_name(value).empty(), "each value has a type");
    // Each look-up answers or refuses; what it allocates is in proportion to the file.
    (void)metadata.get<bool>(key);
    (void)metadata.get<std::int32_t>(key);
    (void)metadata.get<std::uint32_t>(key);
    (void)metadata.get<std::int64_t>(key);
    (void)metadata.get<std::uint64_t>(key);
    (void)metadata.get<double>(key);
    (void)metadata.get<std::string>(key);
    (void)metadata.strings(key);
    (void)metadata.ints(key);
    (void)metadata.floats(key);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  const auto header = parse_gguf(MemorySource(bytes, "input"));
  if (!header) {
    fuzz::check_error(header.error());
    return 0;
  }
  check_metadata(header->metadata);
  fuzz::check_weight_file(bytes);
  return 0;
}
