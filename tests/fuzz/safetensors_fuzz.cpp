// SPDX-License-Identifier: Apache-2.0
#include "metrale/safetensors.h"

#include "fuzz/check_table.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace metrale;
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  const MemorySource source(bytes, "input");

  const auto header = parse_safetensors(source);
  if (header) {
    if (!is_gguf(source)) fuzz::check_weight_file(bytes);
  } else {
    fuzz::check_error(header.error());
  }

  // The same bytes as the index of a sharded set.
  const auto index = parse_safetensors_index(source);
  if (index) {
    for (const auto& [tensor, shard] : index->weight_map) {
      fuzz::require(!shard.empty() && shard.find('/') == std::string::npos && shard != "..", "shards stay in their folder");
    }
  } else {
    fuzz::check_error(index.error());
  }
  return 0;
}
