// SPDX-License-Identifier: Apache-2.0
//
// ChatTemplate: how a conversation is written down for a model. Templates in model files are Jinja programs; this is no interpreter
// for them. It recognises the ChatML family by its markers (SmolLM2, Qwen2, Qwen2.5, Qwen3, Qwen3.5), reads the default system
// prompt out of the template, and refuses what it does not know. A plain value; any number of threads may use one.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/models/tokenizer.h"
#include "metrale/result.h"

namespace metrale {

struct ChatMessage {
  std::string role;  ///< "system", "user" or "assistant".
  std::string content;
};

/// Whether the prompt ends with the header of the assistant's turn, so that the model goes on as the assistant.
enum class GenerationPrompt : std::uint8_t { add, omit };

/// For models that think before they answer. Without effect on others.
enum class Thinking : std::uint8_t {
  by_template,  ///< What the template does when the caller says nothing.
  on,
  off,  ///< The prompt holds an empty thought, so that the model answers at once.
};

class ChatTemplate {
 public:
  /// Recognises a Jinja template.
  /// Errors: unsupported (another family, or none: the message says which markers were seen).
  static Result<ChatTemplate> detect(std::string_view jinja);

  /// The conversation as text, for people and tests. Encode with `encode`, which keeps a message from forging markers.
  /// Errors: invalid_argument (no message, a role that the family does not know, a system message that is not first where the
  /// template forbids it, no user message where it requires one).
  Result<std::string> render(std::span<const ChatMessage> messages, GenerationPrompt prompt = GenerationPrompt::add,
                             Thinking thinking = Thinking::by_template) const;

  /// The conversation as ids. Markers of the template become control tokens; the same characters inside a message stay text.
  /// Errors: as `render`, and not_found (the tokenizer lacks a marker), and those of `Tokenizer::encode`.
  Result<std::vector<TokenId>> encode(const Tokenizer& tokenizer, std::span<const ChatMessage> messages,
                                      GenerationPrompt prompt = GenerationPrompt::add,
                                      Thinking thinking = Thinking::by_template) const;

  /// Ids after which the assistant's turn is over: the end-of-turn marker and all of `tokenizer.end_ids()`. Ascending.
  std::vector<TokenId> stop_ids(const Tokenizer& tokenizer) const;

  /// What the template puts first when the conversation has no system message; empty for nothing.
  const std::string& default_system_prompt() const noexcept { return default_system_prompt_; }

 private:
  enum class History : std::uint8_t {
    verbatim,       ///< Messages as they are.
    hide_thoughts,  ///< Thoughts of earlier turns are left out (Qwen3).
    trim_and_hide,  ///< And every message is trimmed (Qwen3.5).
  };
  enum class Opening : std::uint8_t {
    nothing,
    open_thought,   ///< "<think>\n"
    empty_thought,  ///< "<think>\n\n</think>\n\n"
  };
  struct Segment;

  ChatTemplate() = default;
  Result<std::vector<Segment>> segments(std::span<const ChatMessage> messages, GenerationPrompt prompt, Thinking thinking) const;

  std::string default_system_prompt_;
  History history_ = History::verbatim;
  Opening opening_by_default_ = Opening::nothing;
  Opening opening_when_on_ = Opening::nothing;
  Opening opening_when_off_ = Opening::nothing;
};

}  // namespace metrale
