// SPDX-License-Identifier: Apache-2.0
#include "bridges/cublaslt/algorithm_file.h"

#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <fstream>
#include <string_view>

#include <fmt/format.h>

#include "metrale/log.h"

namespace metrale::cublaslt {
namespace {

constexpr std::string_view kFormat = "metrale cublaslt algorithms 1";
// A model has some hundred plans; what is larger is none of ours.
constexpr std::uintmax_t kMostBytes = std::uintmax_t{16} << 20;
constexpr std::size_t kAlgorithmWords = std::size(cublasLtMatmulAlgo_t{}.data);
constexpr std::size_t kWords = std::tuple_size_v<decltype(Key::words)> + kAlgorithmWords;

std::uint64_t checksum(std::string_view text) noexcept {
  std::uint64_t h = 0xCBF29CE484222325ULL;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  return h;
}

/// The next hexadecimal word of `text`, taken off its front.
std::optional<std::uint64_t> take_word(std::string_view& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  if (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  return value;
}

}  // namespace

AlgorithmFile::AlgorithmFile(const std::string& folder, const std::string& identity)
    : path_(std::filesystem::path(folder) / fmt::format("cublaslt-{:016x}.txt", checksum(identity))), identity_(identity) {
  Algorithms read_now;
  const std::string why_not = read(read_now);
  if (why_not.empty()) {
    algorithms_ = std::move(read_now);
  } else {
    log(LogLevel::warning, fmt::format("{}: {}; it is ignored, and algorithms are measured anew", path_.string(), why_not));
  }
}

std::optional<cublasLtMatmulAlgo_t> AlgorithmFile::find(const Key& key) const {
  const auto found = algorithms_.find(key);
  if (found == algorithms_.end()) return std::nullopt;
  return found->second;
}

void AlgorithmFile::add(const Key& key, const cublasLtMatmulAlgo_t& algorithm) {
  if (path_.empty()) return;
  Algorithms others;
  if (read(others).empty()) algorithms_.merge(others);
  algorithms_[key] = algorithm;
  if (write() || has_warned_) return;
  has_warned_ = true;
  log(LogLevel::warning, fmt::format("{} cannot be written: measured algorithms last as long as this process", path_.string()));
}

std::string AlgorithmFile::read(Algorithms& into) const {
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path_, error);
  if (error) return {};
  if (size > kMostBytes) return "larger than any such file";
  std::ifstream file(path_);
  std::string line;
  if (!std::getline(file, line) || line != kFormat) return "not a file of algorithms of this version";
  if (!std::getline(file, line) || line != identity_) return fmt::format("made for '{}', and this is '{}'", line, identity_);
  for (std::size_t number = 3; std::getline(file, line); ++number) {
    const std::string damaged = fmt::format("line {} is damaged", number);
    const std::size_t end = line.rfind(' ');
    if (end == std::string::npos) return damaged;
    std::string_view rest = line;
    std::string_view sum_text = rest.substr(end + 1);
    if (take_word(sum_text) != checksum(rest.substr(0, end)) || !sum_text.empty()) return damaged;
    rest = rest.substr(0, end);
    std::array<std::uint64_t, kWords> words{};
    for (std::uint64_t& word : words) {
      const auto taken = take_word(rest);
      if (!taken) return damaged;
      word = *taken;
    }
    if (!rest.empty()) return damaged;
    Key key;
    cublasLtMatmulAlgo_t algorithm{};
    std::copy_n(words.begin(), key.words.size(), key.words.begin());
    std::copy_n(words.begin() + key.words.size(), kAlgorithmWords, std::begin(algorithm.data));
    into[key] = algorithm;
  }
  return file.bad() ? "the system cannot read it" : std::string();
}

bool AlgorithmFile::write() const {
  std::error_code error;
  std::filesystem::create_directories(path_.parent_path(), error);
  // Beside it, and renamed: nobody reads half a file.
  std::filesystem::path beside = path_;
  beside += fmt::format(".{}", ::getpid());
  {
    std::ofstream file(beside, std::ios::trunc);
    file << kFormat << '\n' << identity_ << '\n';
    for (const auto& [key, algorithm] : algorithms_) {
      std::string line;
      for (const std::uint64_t word : key.words) line += fmt::format("{:x} ", word);
      for (const std::uint64_t word : algorithm.data) line += fmt::format("{:x} ", word);
      line.pop_back();
      file << line << fmt::format(" {:x}\n", checksum(line));
    }
    file.flush();
    if (!file) {
      std::filesystem::remove(beside, error);
      return false;
    }
  }
  std::filesystem::rename(beside, path_, error);
  if (!error) return true;
  std::filesystem::remove(beside, error);
  return false;
}

}  // namespace metrale::cublaslt
