// SPDX-License-Identifier: Apache-2.0
#include "metrale/models/chat_template.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/text.h"
#include "models/text/utf8.h"

namespace metrale {
namespace {

constexpr std::string_view kStart = "<|im_start|>";
constexpr std::string_view kEnd = "<|im_end|>";
constexpr std::string_view kThink = "<think>";
constexpr std::string_view kThinkEnd = "</think>";
constexpr std::size_t kMaxTemplateBytes = 256U << 10;

// What other families mark their turns with, and members of this one that do more than it shows.
constexpr std::string_view kForeign[] = {
    "[INST]",         "<<SYS>>",       "<start_of_turn>", "<|start_header_id|>",     "<|im_sep|>",
    "<|im_middle|>",  "<|assistant|>", "<|Assistant|>",   "<|START_OF_TURN_TOKEN|>", "<|channel|>",
    "reasoning_mode", "strftime_now",  "<|turn>"};

bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = text.find(from); at != std::string_view::npos; at = text.find(from)) {
    out.append(text.substr(0, at)).append(to);
    text.remove_prefix(at + from.size());
  }
  return out.append(text);
}

// The template without what makes no difference here: white space and its trimming, line breaks in either notation, kinds of quotes
// and of member access.
std::string bare(std::string_view jinja) {
  std::string text = replaced(jinja, "\\n", "");
  std::erase_if(text, [](char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; });
  std::replace(text.begin(), text.end(), '"', '\'');
  constexpr std::pair<std::string_view, std::string_view> kSpellings[] = {
      {"{%-", "{%"},
      {"{{-", "{{"},
      {"-%}", "%}"},
      {"-}}", "}}"},
      {"messages[0]['role']", "messages[0].role"},
      {"message['role']", "message.role"},
      {"message['content']", "message.content"},
  };
  for (const auto& [from, to] : kSpellings) text = replaced(text, from, to);
  return text;
}

// "<|im_start|>system\n" … "<|im_end|>" written out in the template, without anything computed in between.
std::string literal_system_prompt(std::string_view jinja) {
  for (const std::string_view opening : {"<|im_start|>system\n", "<|im_start|>system\\n"}) {
    for (std::size_t at = jinja.find(opening); at != std::string_view::npos; at = jinja.find(opening, at + 1)) {
      const std::string_view rest = jinja.substr(at + opening.size());
      const std::string_view prompt = rest.substr(0, rest.find(kEnd));
      if (prompt.size() == rest.size() || prompt.find_first_of("{}'\"\\") != std::string_view::npos) continue;
      return std::string(prompt);
    }
  }
  return {};
}

std::string_view strip(std::string_view text, bool (*blank)(std::uint32_t)) {
  while (!text.empty()) {
    const text::Utf8Step step = text::utf8_step(text);
    if (!step.valid || !blank(step.code_point)) break;
    text.remove_prefix(step.length);
  }
  while (!text.empty()) {
    std::size_t last = text.size() - 1;
    while (last > 0 && (static_cast<unsigned char>(text[last]) & 0xC0) == 0x80) --last;
    const text::Utf8Step step = text::utf8_step(text.substr(last));
    if (!step.valid || last + step.length != text.size() || !blank(step.code_point)) break;
    text.remove_suffix(step.length);
  }
  return text;
}

// What the templates' `trim` takes away.
bool is_blank(std::uint32_t c) { return text::is_white_space(c) || (c >= 0x1C && c <= 0x1F); }

std::string_view without_newlines_before(std::string_view text) {
  return text.substr(std::min(text.find_first_not_of('\n'), text.size()));
}

std::string_view without_newlines(std::string_view text) {
  return strip(text, [](std::uint32_t c) { return c == '\n'; });
}

// A message of the assistant, taken apart where it holds a thought.
struct Answer {
  std::string_view thought;
  std::string_view content;
};
Answer take_apart(std::string_view content) {
  const std::size_t last = content.rfind(kThinkEnd);
  if (last == std::string_view::npos) return {{}, content};
  std::string_view thought = content.substr(0, content.find(kThinkEnd));
  if (const std::size_t open = thought.rfind(kThink); open != std::string_view::npos) thought.remove_prefix(open + kThink.size());
  return {without_newlines(thought), without_newlines_before(content.substr(last + kThinkEnd.size()))};
}

bool is_query(const ChatMessage& message) {
  return message.role == "user" &&
         !(message.content.starts_with("<tool_response>") && message.content.ends_with("</tool_response>"));
}

}  // namespace

struct ChatTemplate::Segment {
  std::string text;
  bool marker = false;
};

Result<ChatTemplate> ChatTemplate::detect(std::string_view jinja) {
  constexpr std::string_view kKnown = "metrale knows ChatML with <|im_start|> and <|im_end|>";
  if (jinja.find_first_not_of(" \n\r\t") == std::string_view::npos)
    return Error(Errc::unsupported, fmt::format("the model has no chat template; {}", kKnown));
  if (jinja.size() > kMaxTemplateBytes)
    return Error(Errc::unsupported,
                 fmt::format("the chat template has {} bytes; at most {} are read", jinja.size(), kMaxTemplateBytes));
  std::string seen;
  for (const std::string_view marker : kForeign) {
    if (contains(jinja, marker)) seen += fmt::format("{}{}", seen.empty() ? "" : " ", marker);
  }
  if (!seen.empty()) return Error(Errc::unsupported, fmt::format("the chat template uses {}; {}", seen, kKnown));
  const auto refuse = [&] {
    return Error(Errc::unsupported, fmt::format("the chat template {} is of a form that is not known; {}",
                                                detail::quote(jinja.substr(0, 80)), kKnown));
  };
  const std::string text = bare(jinja);
  constexpr std::string_view kTurn = "'<|im_start|>'+message.role+''+";
  const bool turns = contains(text, fmt::format("{}message.content+'<|im_end|>", kTurn)) ||
                     contains(text, fmt::format("{}content+'<|im_end|>", kTurn));
  // A system turn that is always there is one that this code would leave out.
  const bool always_system = contains(text, "<|im_start|>system") && !contains(text, "messages[0].role");
  const std::size_t prompt = text.rfind("{%ifadd_generation_prompt%}");
  if (!turns || always_system || prompt == std::string::npos) return refuse();

  // How the prompt ends decides what thinking means; everything that may stand there is listed, so that no other form passes for
  // one of these.
  using enum Opening;
  struct Ending {
    std::string_view text;
    Opening by_default, on, off;
  };
  constexpr Ending kEndings[] = {
      {"{{'<|im_start|>assistant'}}{%endif%}", nothing, nothing, nothing},
      {"{{'<|im_start|>assistant<think>'}}{%endif%}", open_thought, open_thought, open_thought},
      {"{{'<|im_start|>assistant'}}{%ifenable_thinkingisdefinedandenable_thinkingisfalse%}{{'<think></think>'}}{%endif%}{%endif%}",
       nothing, nothing, empty_thought},
      {"{{'<|im_start|>assistant'}}{%ifenable_thinkingisdefinedandenable_thinkingisfalse%}{{'<think></"
       "think>'}}{%else%}{{'<think>'}}"
       "{%endif%}{%endif%}",
       open_thought, open_thought, empty_thought},
      {"{{'<|im_start|>assistant'}}{%ifenable_thinkingisdefinedandenable_thinkingistrue%}{{'<think>'}}{%else%}{{'<think></think>'}}"
       "{%endif%}{%endif%}",
       empty_thought, open_thought, empty_thought},
  };
  std::string_view ending = std::string_view(text).substr(prompt);
  ending.remove_prefix(ending.find("%}") + 2);
  const auto* known = std::find_if(std::begin(kEndings), std::end(kEndings), [&](const Ending& e) { return e.text == ending; });
  if (known == std::end(kEndings)) return refuse();

  ChatTemplate result;
  result.default_system_prompt_ = literal_system_prompt(jinja);
  if (contains(text, "split('</think>')"))
    result.history_ = contains(text, "|trim") ? History::trim_and_hide : History::hide_thoughts;
  result.opening_by_default_ = known->by_default;
  result.opening_when_on_ = known->on;
  result.opening_when_off_ = known->off;
  return result;
}

Result<std::vector<ChatTemplate::Segment>> ChatTemplate::segments(std::span<const ChatMessage> messages, GenerationPrompt prompt,
                                                                  Thinking thinking) const {
  if (messages.empty()) return Error(Errc::invalid_argument, "render a conversation without a message: at least one is needed");
  std::size_t last_query = messages.size() - 1;
  bool has_query = false;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string& role = messages[i].role;
    if (role != "system" && role != "user" && role != "assistant")
      return Error(Errc::invalid_argument,
                   fmt::format("message {} has role {}: system, user or assistant is needed", i, detail::quote(role)));
    if (role == "system" && i != 0 && history_ == History::trim_and_hide)
      return Error(Errc::invalid_argument, fmt::format("message {} is a system message: this model takes it first only", i));
    if (is_query(messages[i])) {
      last_query = i;
      has_query = true;
    }
  }
  if (!has_query && history_ == History::trim_and_hide)
    return Error(Errc::invalid_argument, "a conversation without a user's message: this model needs one");

  std::vector<Segment> out;
  const auto turn = [&out](std::string_view role, std::string_view content) {
    out.push_back({std::string(kStart), true});
    out.push_back({fmt::format("{}\n{}", role, content), false});
    out.push_back({std::string(kEnd), true});
    out.push_back({"\n", false});
  };
  if (messages[0].role != "system" && !default_system_prompt_.empty()) turn("system", default_system_prompt_);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    std::string_view content = messages[i].content;
    if (history_ == History::trim_and_hide) content = strip(content, is_blank);
    if (messages[i].role != "assistant" || history_ == History::verbatim) {
      turn(messages[i].role, content);
      continue;
    }
    Answer answer = take_apart(content);
    if (history_ == History::trim_and_hide) answer.thought = strip(answer.thought, is_blank);
    // Answers to the last question keep their thought; the last message has one even if it is empty.
    const bool thought =
        i > last_query && (history_ == History::trim_and_hide || i + 1 == messages.size() || !answer.thought.empty());
    if (!thought) {
      turn("assistant", answer.content);
    } else {
      if (history_ == History::hide_thoughts) answer.content = without_newlines_before(answer.content);
      turn("assistant", fmt::format("{}\n{}\n{}\n\n{}", kThink, answer.thought, kThinkEnd, answer.content));
    }
  }
  if (prompt == GenerationPrompt::add) {
    const Opening opening = thinking == Thinking::by_template ? opening_by_default_
                            : thinking == Thinking::on        ? opening_when_on_
                                                              : opening_when_off_;
    std::string header = "assistant\n";
    if (opening == Opening::open_thought) header += fmt::format("{}\n", kThink);
    if (opening == Opening::empty_thought) header += fmt::format("{}\n\n{}\n\n", kThink, kThinkEnd);
    out.push_back({std::string(kStart), true});
    out.push_back({std::move(header), false});
  }
  return out;
}

Result<std::string> ChatTemplate::render(std::span<const ChatMessage> messages, GenerationPrompt prompt, Thinking thinking) const {
  return detail::guarded("chat template", [&]() -> Result<std::string> {
    std::string text;
    for (const Segment& segment : METRALE_TRY(segments(messages, prompt, thinking))) text += segment.text;
    return text;
  });
}

Result<std::vector<TokenId>> ChatTemplate::encode(const Tokenizer& tokenizer, std::span<const ChatMessage> messages,
                                                  GenerationPrompt prompt, Thinking thinking) const {
  return detail::guarded("chat template", [&]() -> Result<std::vector<TokenId>> {
    std::vector<TokenId> ids;
    if (tokenizer.add_bos()) ids.push_back(*tokenizer.bos());
    for (const Segment& segment : METRALE_TRY(segments(messages, prompt, thinking))) {
      if (segment.marker) {
        const auto id = tokenizer.find_added(segment.text);
        if (!id)
          return Error(Errc::not_found, fmt::format("the tokenizer has no token {}, which its chat template needs", segment.text));
        ids.push_back(*id);
      } else {
        const auto part = METRALE_TRY(tokenizer.encode(segment.text, SpecialTokens::as_text));
        ids.insert(ids.end(), part.begin(), part.end());
      }
    }
    return ids;
  });
}

std::vector<TokenId> ChatTemplate::stop_ids(const Tokenizer& tokenizer) const {
  const auto ends = tokenizer.end_ids();
  std::vector<TokenId> ids(ends.begin(), ends.end());
  if (const auto end = tokenizer.find_added(kEnd)) ids.push_back(*end);
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

}  // namespace metrale
