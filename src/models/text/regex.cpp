// SPDX-License-Identifier: Apache-2.0
#include "models/text/regex.h"

#include <fmt/format.h>

#include <array>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "core/text.h"

namespace metrale::text {
namespace {

constexpr std::size_t kMaxPatternBytes = 16U << 10;
constexpr std::size_t kJitStackStart = 32U << 10;
constexpr std::size_t kJitStackMax = 4U << 20;
constexpr std::uint32_t kHeapLimitKib = 64U << 10;

// A match attempt at one place takes few steps, and no credit, as a rule. A run of n characters that almost matches is given back
// one by one: that needs more, in proportion to the run. Patterns that explode need far more for every place, which credit does
// not cover.
constexpr std::uint32_t kFreeSteps = 256;
constexpr std::uint32_t kStepsFactor = 4;
constexpr std::size_t kBaseCredit = 32U << 20;
constexpr std::size_t kCreditPerByte = 32;
// Places that are tried in one call. They double while nothing is found; after a place that took many steps the next may too.
constexpr std::size_t kWindow = 64;
constexpr std::size_t kWindowAfterSteps = 8;
constexpr std::size_t kMaxWindow = 1U << 20;

std::string pcre2_text(int code) {
  std::array<PCRE2_UCHAR, 256> buffer{};
  pcre2_get_error_message(code, buffer.data(), buffer.size());
  return reinterpret_cast<const char*>(buffer.data());
}

struct CodeFree {
  void operator()(pcre2_code* code) const noexcept { pcre2_code_free(code); }
};

// Oniguruma's \s is the property White_Space; PCRE2's has U+180E too. Set operations and \h mean something else in PCRE2.
Result<std::string> translate(std::string_view pattern, std::string_view where) {
  const auto refuse = [&](std::string_view what) {
    return Error(Errc::unsupported, fmt::format("{}: pattern {} uses {}", where, detail::quote(pattern), what));
  };
  std::string out;
  bool in_class = false;
  std::size_t class_start = 0;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    const char next = i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (c == '\\' && i + 1 < pattern.size()) {
      ++i;
      switch (next) {
        case 's': out += "\\p{White_Space}"; break;
        case 'S': out += "\\P{White_Space}"; break;
        case 'h':
        case 'H':
        case 'Q':
        case 'E':
        case 'K':
        case 'C': return refuse(fmt::format("\\{}", next));
        default: out += c; out += next;
      }
      continue;
    }
    if (!in_class) {
      if (c == '[') {
        in_class = true;
        class_start = next == '^' ? i + 2 : i + 1;
      } else if (c == '(' && next == '*') {
        return refuse("(*");
      }
    } else if (c == ']' && i != class_start) {
      in_class = false;
    } else if (c == '[' && next != ':') {
      return refuse("a class inside a class");
    } else if (c == '&' && next == '&') {
      return refuse("&& inside a class");
    }
    out += c;
  }
  return out;
}

}  // namespace

struct Regex::Code {
  std::unique_ptr<pcre2_code, CodeFree> compiled;
  std::string shown;
};

struct Regex::Scratch::Parts {
  std::size_t credit = kBaseCredit;
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(kJitStackStart, kJitStackMax, nullptr);

  Parts() {
    if (context == nullptr) return;
    pcre2_set_heap_limit(context, kHeapLimitKib);
    if (stack != nullptr) pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~Parts() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
  }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;
};

Regex::Scratch::Scratch() : parts_(std::make_unique<Parts>()) {}
Regex::Scratch::~Scratch() = default;

void Regex::Scratch::restart(std::size_t text_bytes) { parts_->credit = kBaseCredit + kCreditPerByte * text_bytes; }

Result<Regex> Regex::build(std::string_view pattern, std::uint32_t options, std::string_view shown, std::string_view where) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  auto code = std::make_shared<Code>();
  code->shown = detail::quote(shown);
  code->compiled.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                     PCRE2_UTF | PCRE2_USE_OFFSET_LIMIT | options, &error, &offset, nullptr));
  if (code->compiled == nullptr)
    return Error(Errc::bad_format, fmt::format("{}: pattern {} does not compile: {}", where, code->shown, pcre2_text(error)))
        .with_native(error, pcre2_text(error));
  // Where the machine forbids code made at run time, matching is interpreted: slower, otherwise the same.
  static_cast<void>(pcre2_jit_compile(code->compiled.get(), PCRE2_JIT_COMPLETE));
  return Regex(std::move(code));
}

Result<Regex> Regex::compile(std::string_view pattern, std::string_view where) {
  if (pattern.size() > kMaxPatternBytes)
    return Error(Errc::bad_format,
                 fmt::format("{}: pattern of {} bytes; at most {} are read", where, pattern.size(), kMaxPatternBytes));
  const std::string translated = METRALE_TRY(translate(pattern, where));
  // ^ and $ are ends of lines in the dialect of the files.
  return build(translated, PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, pattern, where);
}

Result<Regex> Regex::literal(std::string_view text, std::string_view where) {
  if (text.size() > kMaxPatternBytes)
    return Error(Errc::bad_format,
                 fmt::format("{}: pattern of {} bytes; at most {} are read", where, text.size(), kMaxPatternBytes));
  return build(text, PCRE2_LITERAL, text, where);
}

Result<std::optional<Regex::Match>> Regex::find(std::string_view text, std::size_t from, Scratch& scratch) const {
  auto& parts = *scratch.parts_;
  if (parts.data == nullptr || parts.context == nullptr) return Error(Errc::out_of_memory, "no host memory left for matching text");
  std::size_t window = kWindow;
  std::uint32_t steps = kFreeSteps;
  while (from <= text.size()) {
    pcre2_set_match_limit(parts.context, steps);
    pcre2_set_offset_limit(parts.context, from + window - 1);
    const int count = pcre2_match(code_->compiled.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                                  PCRE2_NO_UTF_CHECK, parts.data, parts.context);
    if (count >= 0) {
      const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(parts.data);
      return std::optional<Match>({bounds[0], bounds[1]});
    }
    if (count == PCRE2_ERROR_NOMATCH) {
      from += window;
      while (from < text.size() && (static_cast<unsigned char>(text[from]) & 0xC0) == 0x80) ++from;
      window = steps == kFreeSteps ? std::min(window * 2, kMaxWindow) : kWindowAfterSteps;
      steps = kFreeSteps;
    } else if (count == PCRE2_ERROR_MATCHLIMIT && window > 1) {
      window = std::max<std::size_t>(window / 8, 1);  // first find the place
    } else if (count == PCRE2_ERROR_MATCHLIMIT && parts.credit / kStepsFactor >= steps) {
      steps *= kStepsFactor;
      parts.credit -= steps;
    } else {
      return Error(Errc::bad_format, fmt::format("the tokenizer's pattern {} gave up on a text of {} bytes: {}", code_->shown,
                                                 text.size(), pcre2_text(count)))
          .with_native(count, pcre2_text(count));
    }
  }
  return std::optional<Match>();
}

}  // namespace metrale::text
