// SPDX-License-Identifier: Apache-2.0
#include "models/text/pre_tokenizer.h"

#include "models/text/utf8.h"

namespace metrale::text {
namespace {

// Puts ranges of one piece together as a behaviour demands, in text order.
class Joiner {
 public:
  Joiner(std::string_view piece, SplitBehavior behavior, bool invert, std::vector<std::string_view>& out)
      : piece_(piece), behavior_(behavior), invert_(invert), out_(out) {}

  void add(std::size_t begin, std::size_t end, bool matched) {
    if (begin == end) return;
    matched = matched != invert_;
    switch (behavior_) {
      case SplitBehavior::removed:
        if (!matched) emit(begin, end);
        return;
      case SplitBehavior::isolated: emit(begin, end); return;
      case SplitBehavior::contiguous:
        if (open_ && matched == last_matched_) {
          open_end_ = end;
          return;
        }
        break;
      case SplitBehavior::merged_with_previous:
        if (open_ && matched && !last_matched_) {
          open_end_ = end;
          last_matched_ = true;
          return;
        }
        break;
      case SplitBehavior::merged_with_next:
        if (open_ && !matched && last_matched_) {
          open_end_ = end;
          last_matched_ = false;
          return;
        }
        break;
    }
    finish();
    open_ = true;
    open_begin_ = begin;
    open_end_ = end;
    last_matched_ = matched;
  }

  void finish() {
    if (open_) emit(open_begin_, open_end_);
    open_ = false;
  }

 private:
  void emit(std::size_t begin, std::size_t end) { out_.push_back(piece_.substr(begin, end - begin)); }

  std::string_view piece_;
  SplitBehavior behavior_;
  bool invert_;
  std::vector<std::string_view>& out_;
  bool open_ = false;
  bool last_matched_ = false;
  std::size_t open_begin_ = 0;
  std::size_t open_end_ = 0;
};

}  // namespace

void PreTokenizer::add_split(Regex regex, SplitBehavior behavior, bool invert) {
  stages_.push_back({std::move(regex), behavior, invert});
}

void PreTokenizer::add_prefix_space() { stages_.push_back({}); }

Result<> PreTokenizer::cut(const Stage& stage, std::string_view piece, Scratch& scratch) {
  if (!stage.regex) {
    if (piece.starts_with(' ')) {
      scratch.next.push_back(piece);
    } else {
      scratch.next.push_back(scratch.owned.emplace_back(" ").append(piece));
    }
    return {};
  }
  Joiner joiner(piece, stage.behavior, stage.invert, scratch.next);
  std::size_t done = 0;  // everything before is in the joiner
  std::size_t from = 0;  // where the next search starts
  while (from < piece.size()) {
    const auto match = METRALE_TRY(stage.regex->find(piece, from, scratch.regex));
    if (!match) break;
    if (match->begin < done || match->end < match->begin) return Error(Errc::internal, "a regular expression matched backwards");
    joiner.add(done, match->begin, false);
    joiner.add(match->begin, match->end, true);
    done = match->end;
    // An empty match separates, and the search goes on behind the next character.
    from = match->end;
    if (match->begin == match->end && from < piece.size()) from += utf8_step(piece.substr(from)).length;
  }
  joiner.add(done, piece.size(), false);
  joiner.finish();
  return {};
}

Result<> PreTokenizer::split(std::string_view text, Scratch& scratch) const {
  scratch.pieces.clear();
  scratch.owned.clear();
  if (text.empty()) return {};
  scratch.pieces.push_back(text);
  for (const Stage& stage : stages_) {
    scratch.next.clear();
    scratch.regex.restart(text.size());
    for (const std::string_view piece : scratch.pieces) METRALE_TRY(cut(stage, piece, scratch));
    scratch.pieces.swap(scratch.next);
  }
  return {};
}

}  // namespace metrale::text
