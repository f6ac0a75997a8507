// SPDX-License-Identifier: Apache-2.0
//
// PreTokenizer: cuts text into the words that are encoded one by one. It is a list of stages; each cuts every piece that the one
// before made, and sees nothing of its neighbours.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/result.h"
#include "models/text/regex.h"

namespace metrale::text {

/// What becomes of a match; names as in tokenizer.json.
enum class SplitBehavior : std::uint8_t { removed, isolated, merged_with_previous, merged_with_next, contiguous };

class PreTokenizer {
 public:
  static constexpr std::size_t kMaxStages = 32;

  /// Cuts at the matches of `regex`, or between them with `invert`.
  void add_split(Regex regex, SplitBehavior behavior, bool invert = false);
  /// Puts a space before each piece that does not start with one.
  void add_prefix_space();
  std::size_t num_stages() const noexcept { return stages_.size(); }

  struct Scratch {
    Regex::Scratch regex;
    std::vector<std::string_view> pieces;  ///< The result; views into the text or into `owned`.
    std::vector<std::string_view> next;
    std::deque<std::string> owned;
  };
  /// Fills `scratch.pieces` with the non-empty pieces of `text`, valid UTF-8. They are valid until the next call and
  /// while `text` is.
  /// Errors: those of Regex::find.
  Result<> split(std::string_view text, Scratch& scratch) const;

 private:
  struct Stage {
    std::optional<Regex> regex;  // none: prefix space
    SplitBehavior behavior = SplitBehavior::isolated;
    bool invert = false;
  };
  static Result<> cut(const Stage& stage, std::string_view piece, Scratch& scratch);

  std::vector<Stage> stages_;
};

}  // namespace metrale::text
