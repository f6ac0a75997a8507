// SPDX-License-Identifier: Apache-2.0
#include "models/text/nfc.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "models/text/utf8.h"

namespace metrale::text {
namespace {

struct Decomposition {
  std::uint32_t code_point;
  std::uint32_t first;
  std::uint32_t second;
  bool composes;
};
struct ClassRange {
  std::uint32_t first;
  std::uint32_t last;
  std::uint8_t ccc;
};
#include "models/text/nfc_tables.inc"

// Nothing below changes under composition or takes part in it.
constexpr std::uint32_t kFirstOfInterest = 0xC0;
constexpr std::uint32_t kFirstCombining = 0x300;

// Hangul syllables are computed, not listed.
constexpr std::uint32_t kSBase = 0xAC00, kLBase = 0x1100, kVBase = 0x1161, kTBase = 0x11A7;
constexpr std::uint32_t kLCount = 19, kVCount = 21, kTCount = 28, kSCount = kLCount * kVCount * kTCount;

struct Char {
  std::uint32_t code_point;
  std::uint8_t ccc;
};

std::uint8_t combining_class(std::uint32_t c) noexcept {
  if (c < kFirstCombining) return 0;
  const auto* it = std::upper_bound(std::begin(kClasses), std::end(kClasses), c,
                                    [](std::uint32_t value, const ClassRange& range) { return value < range.first; });
  if (it == std::begin(kClasses)) return 0;
  --it;
  return c <= it->last ? it->ccc : 0;
}

void decompose(std::uint32_t c, std::vector<Char>& out) {
  if (c >= kSBase && c < kSBase + kSCount) {
    const std::uint32_t s = c - kSBase;
    out.push_back({kLBase + s / (kVCount * kTCount), 0});
    out.push_back({kVBase + s % (kVCount * kTCount) / kTCount, 0});
    if (s % kTCount != 0) out.push_back({kTBase + s % kTCount, 0});
    return;
  }
  if (c >= kFirstOfInterest) {
    const auto* it = std::lower_bound(std::begin(kDecompositions), std::end(kDecompositions), c,
                                      [](const Decomposition& d, std::uint32_t value) { return d.code_point < value; });
    if (it != std::end(kDecompositions) && it->code_point == c) {
      decompose(it->first, out);
      if (it->second != 0) decompose(it->second, out);
      return;
    }
  }
  out.push_back({c, combining_class(c)});
}

// The decompositions that reverse, by what they are made of.
const std::vector<Decomposition>& compositions() {
  static const std::vector<Decomposition> sorted = [] {
    std::vector<Decomposition> table;
    for (const Decomposition& d : kDecompositions) {
      if (d.composes) table.push_back(d);
    }
    std::sort(table.begin(), table.end(), [](const Decomposition& a, const Decomposition& b) {
      return a.first != b.first ? a.first < b.first : a.second < b.second;
    });
    return table;
  }();
  return sorted;
}

// 0 for a pair that does not compose.
std::uint32_t compose(std::uint32_t a, std::uint32_t b) {
  if (a >= kLBase && a < kLBase + kLCount && b >= kVBase && b < kVBase + kVCount)
    return kSBase + ((a - kLBase) * kVCount + (b - kVBase)) * kTCount;
  if (a >= kSBase && a < kSBase + kSCount && (a - kSBase) % kTCount == 0 && b > kTBase && b < kTBase + kTCount)
    return a + (b - kTBase);
  const auto& table = compositions();
  const auto it = std::lower_bound(table.begin(), table.end(), std::pair(a, b), [](const Decomposition& d, const auto& pair) {
    return d.first != pair.first ? d.first < pair.first : d.second < pair.second;
  });
  return it != table.end() && it->first == a && it->second == b ? it->code_point : 0;
}

// Sorts each run of marks by class, those of one class in the order in which they came.
void order_marks(std::vector<Char>& chars) {
  std::vector<std::pair<std::uint64_t, Char>> run;
  for (std::size_t begin = 0; begin < chars.size(); ++begin) {
    run.clear();
    while (begin + run.size() < chars.size() && chars[begin + run.size()].ccc != 0) {
      const Char& mark = chars[begin + run.size()];
      run.emplace_back(std::uint64_t{mark.ccc} << 56 | run.size(), mark);
    }
    if (run.empty()) continue;
    std::sort(run.begin(), run.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [key, mark] : run) chars[begin++] = mark;
  }
}

}  // namespace

bool is_surely_nfc(std::string_view text) noexcept {
  for (const char byte : text) {
    // U+0300 is the first code point that is not always as it should be, and 0xCC starts it.
    if (static_cast<unsigned char>(byte) >= 0xCC) return false;
  }
  return true;
}

std::string to_nfc(std::string_view text) {
  std::vector<Char> chars;
  chars.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Step step = utf8_step(text.substr(at));
    decompose(step.code_point, chars);
    at += step.length;
  }
  order_marks(chars);

  std::string out;
  out.reserve(text.size());
  // `written` characters are final but for the last starter among them, which may still take in what follows.
  std::size_t written = 0;
  std::size_t starter = SIZE_MAX;
  for (const Char& c : chars) {
    if (starter != SIZE_MAX) {
      const bool adjacent = starter + 1 == written;
      const bool blocked = !adjacent && chars[written - 1].ccc >= c.ccc;
      if (!blocked) {
        if (const std::uint32_t composed = compose(chars[starter].code_point, c.code_point); composed != 0) {
          chars[starter].code_point = composed;
          continue;
        }
      }
    }
    if (c.ccc == 0) starter = written;
    chars[written++] = c;
  }
  for (std::size_t i = 0; i < written; ++i) append_utf8(chars[i].code_point, out);
  return out;
}

}  // namespace metrale::text
