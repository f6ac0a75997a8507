// SPDX-License-Identifier: Apache-2.0
//
// What must hold for any model configuration and tokenizer that is accepted, and for the words with which one is refused.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "core/text.h"
#include "metrale/models/chat_template.h"
#include "metrale/models/model_config.h"
#include "metrale/models/tokenizer.h"

namespace metrale::fuzz {

inline void must(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

/// A refusal of the file "input".
inline void check_refusal(const Error& error) {
  must(error.message().find("input") != std::string::npos, "the message names the file");
  must(error.message().size() < 1000, "the message is short");
  for (const char c : error.message()) must(static_cast<unsigned char>(c) >= 0x20, "the message is one printable line");
  must(detail::valid_utf8(error.message()), "the message is UTF-8");
  must(error.code() == Errc::bad_format || error.code() == Errc::unsupported || error.code() == Errc::not_found,
       "the code tells a bad file");
}

inline void check_config(const ModelConfig& config) {
  must(config.num_kv_heads > 0 && config.num_heads % config.num_kv_heads == 0, "heads divide");
  must(config.head_dim % 2 == 0 && config.head_dim > 0, "heads are even");
  must(config.rope.rotary_dim % 2 == 0 && config.rope.rotary_dim > 0 && config.rope.rotary_dim <= config.head_dim, "rotary fits");
  must(config.layers.size() == config.num_layers && config.num_layers > 0 && config.num_layers <= ModelLimits::kLayers, "layers");
  must(config.vocab_size > 0 && config.vocab_size <= ModelLimits::kVocab, "vocabulary");
  must(config.hidden_size > 0 && config.intermediate_size > 0 && config.max_position > 0, "sizes are positive");
  must(config.rms_norm_eps > 0.0F && std::isfinite(config.rms_norm_eps), "epsilon is positive and finite");
  must(config.num_parameters() <= ModelLimits::kParameters, "parameters are bounded");
  must(config.num_layers_of(LayerKind::full_attention) + config.num_layers_of(LayerKind::linear_attention) == config.num_layers,
       "each layer is of one kind");
  if (config.family == ModelFamily::qwen3_5)
    must(config.linear.num_key_heads > 0 && config.linear.num_value_heads % config.linear.num_key_heads == 0,
         "linear heads divide");
  must(config.rope.inverse_frequencies().size() == config.rope.rotary_dim / 2, "a frequency for each pair");
  for (const auto id : config.eos_ids) must(id >= 0 && static_cast<std::uint32_t>(id) < config.vocab_size, "ends are tokens");
}

/// Encodes, decodes and streams `text`; returns the bytes of the ids.
inline std::string check_tokenizer(const Tokenizer& tokenizer, std::string_view text) {
  std::string joined;
  for (const auto special : {SpecialTokens::recognise, SpecialTokens::as_text}) {
    const auto ids = tokenizer.encode(text, special);
    if (!ids) {
      must(ids.error().code() == Errc::bad_format, "encoding fails only where a pattern gives up");
      return std::string(text);
    }
    joined.clear();
    StreamDecoder stream(tokenizer, SpecialText::keep);
    std::string streamed;
    for (const TokenId id : *ids) {
      must(id >= 0 && static_cast<std::size_t>(id) < tokenizer.vocab_size(), "ids are tokens");
      joined += *tokenizer.bytes(id);
      streamed += *stream.push(id);
    }
    streamed += stream.finish();
    const auto decoded = tokenizer.decode(*ids);
    must(decoded && *decoded == streamed, "streaming gives the decoded text");
    must(detail::valid_utf8(*decoded), "decoded text is UTF-8");
    const auto dropped = tokenizer.decode(*ids, SpecialText::drop);
    must(dropped && dropped->size() <= decoded->size() + 16 * ids->size(), "text without control tokens");
  }
  must(!tokenizer.decode(std::vector<TokenId>{static_cast<TokenId>(tokenizer.vocab_size())}), "an id too large is an error");
  for (const TokenId id : tokenizer.end_ids()) must(static_cast<bool>(tokenizer.bytes(id)), "ends are tokens");
  return joined;
}

inline void check_template(const Tokenizer& tokenizer, std::string_view jinja, std::string_view text) {
  const auto chat = ChatTemplate::detect(jinja);
  if (!chat) {
    must(chat.error().code() == Errc::unsupported, "an unknown template is unsupported");
    return;
  }
  const std::vector<ChatMessage> messages{{"user", std::string(text)}, {"assistant", std::string(text)}, {"user", "x"}};
  const auto rendered = chat->render(messages);
  must(rendered && rendered->find("<|im_start|>") != std::string::npos, "a known template renders");
  const auto ids = chat->encode(tokenizer, messages);
  must(ids || ids.error().code() == Errc::not_found || ids.error().code() == Errc::bad_format, "rendered text encodes");
}

}  // namespace metrale::fuzz
