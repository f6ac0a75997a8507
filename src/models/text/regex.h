// SPDX-License-Identifier: Apache-2.0
//
// Regular expressions of tokenizers, run by PCRE2 with Unicode properties. Patterns come from files that nobody vouches for, so
// compiling and matching are bounded.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "metrale/result.h"

namespace metrale::text {

class Regex {
 public:
  /// Compiles a pattern in the dialect of Hugging Face tokenizers (Oniguruma). What that dialect reads otherwise than PCRE2 is
  /// translated or refused. `where` names file and place in messages.
  /// Errors: bad_format (does not compile, too long), unsupported (has no counterpart).
  static Result<Regex> compile(std::string_view pattern, std::string_view where);
  /// Matches `text` itself.
  static Result<Regex> literal(std::string_view text, std::string_view where);

  /// What matching needs besides the pattern. One for each thread.
  class Scratch {
   public:
    Scratch();
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    /// Allows the steps that an honest pattern may need to go through `text_bytes` once.
    void restart(std::size_t text_bytes);

   private:
    friend class Regex;
    struct Parts;
    std::unique_ptr<Parts> parts_;
  };

  struct Match {
    std::size_t begin;
    std::size_t end;
  };
  /// The first match that starts at or after `from`. `text` must be valid UTF-8 and `from` the start of a character.
  /// Steps are counted against what `scratch` allows, so that all searches between two restarts take time in proportion
  /// to the text.
  /// Errors: bad_format (too many steps: the message names the pattern).
  Result<std::optional<Match>> find(std::string_view text, std::size_t from, Scratch& scratch) const;

 private:
  struct Code;
  explicit Regex(std::shared_ptr<const Code> code) : code_(std::move(code)) {}
  static Result<Regex> build(std::string_view pattern, std::uint32_t options, std::string_view shown, std::string_view where);

  std::shared_ptr<const Code> code_;  // shared because stages that use one pattern are copied with it; never changes
};

}  // namespace metrale::text
