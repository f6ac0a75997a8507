// SPDX-License-Identifier: Apache-2.0
//
// A config.json, or a GGUF file for what its metadata says of the model and its tokenizer.
#include <span>

#include "fuzz/check_text.h"
#include "metrale/gguf.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace metrale;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (!text.starts_with("GGUF")) {
    const auto config = parse_model_config(text, "input");
    if (config) {
      fuzz::check_config(*config);
    } else {
      fuzz::check_refusal(config.error());
    }
    return 0;
  }
  const auto header = parse_gguf(MemorySource(std::as_bytes(std::span(data, size)), "input"));
  if (!header) return 0;  // another target's concern
  const auto config = model_config_from_gguf(*header, "input");
  if (config) {
    fuzz::check_config(*config);
  } else {
    fuzz::check_refusal(config.error());
  }
  const auto tokenizer = Tokenizer::from_gguf(header->metadata, "input");
  if (tokenizer) {
    static_cast<void>(fuzz::check_tokenizer(**tokenizer, "Hello <|im_end|> 12 \xF0\x9F\x98\x80 \xFF"));
    fuzz::check_template(**tokenizer, (*tokenizer)->chat_template(), "Hello");
  } else {
    fuzz::check_refusal(tokenizer.error());
  }
  return 0;
}
