// SPDX-License-Identifier: Apache-2.0
#include "command.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <span>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "metrale/backends.h"
#include "metrale/backends/cuda_kernels.h"
#include "metrale/backends/host_kernels.h"
#include "metrale/byte_source.h"

namespace metrale::cli {
namespace {

Error too_long(std::string_view what) {
  return Error(Errc::invalid_argument,
               fmt::format("{} has more than {} MiB, the most that is read; give a part of it", what, kMaxTextBytes >> 20));
}

}  // namespace

void add_backend_option(CLI::App& command, std::string& backend, Offer offer) {
  const auto offered = [offer](const BackendInfo& row) { return row.computes || offer == Offer::every_backend; };
  std::vector<std::string> names{"auto"};
  for (const BackendInfo& row : backends()) {
    if (offered(row)) names.emplace_back(row.name);
  }
  const std::string list = fmt::format("{}", fmt::join(names, ", "));
  backend = "auto";
  const Check check = [offered, list, known = one_of(names)](const std::string& name) {
    const BackendInfo* row = find_backend(name);
    if (row != nullptr && !offered(*row)) return fmt::format("the {} backend computes nothing; take one of {}", name, list);
    return known(name);
  };
  command.add_option("--backend", backend, "Where to run: " + list)->check(check)->capture_default_str();
}

CLI::Option* add_model_option(CLI::App& command, std::string& model, const std::string& help) {
  return command.add_option("--model", model, help)->check(not_empty());
}

void ComputeChoice::apply(DecoderOptions& options) const {
  options.precision = precision == "exact" ? Precision::exact : Precision::fast;
  options.tokens_per_replay = tokens_per_replay;
  options.kv_type.reset();
  if (kv == "f32") options.kv_type = DType::f32;
  if (kv == "bf16") options.kv_type = DType::bf16;
}

void add_compute_options(CLI::App& command, ComputeChoice& choice) {
  command
      .add_option("--precision", choice.precision, "exact: dequantise weights and compute in float32: slow, the reference for fast")
      ->check(one_of({"fast", "exact"}))
      ->capture_default_str();
  command.add_option("--kv", choice.kv, "Element type of the KV cache; auto: what suits backend and precision")
      ->check(one_of({"auto", "f32", "bf16"}))
      ->capture_default_str();
  command
      .add_option("--tokens-per-replay", choice.tokens_per_replay,
                  "Tokens that the device decodes greedily between two waits of the host; 0: what suits the backend")
      ->check(whole_number(0, 256))
      ->capture_default_str();
}

Check not_empty() {
  return [](const std::string& text) { return text.empty() ? std::string("is empty; leave it out or name something") : ""; };
}

Check one_of(std::vector<std::string> names) {
  return [names = std::move(names)](const std::string& text) {
    if (std::find(names.begin(), names.end(), text) != names.end()) return std::string();
    return fmt::format("'{}' is none of {}", text, fmt::join(names, ", "));
  };
}

Check whole_number(std::uint64_t least, std::uint64_t most) {
  return [least, most](const std::string& text) {
    std::uint64_t value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    const bool zero_before = text.size() > 1 && text[0] == '0';
    if (error == std::errc() && stop == end && !zero_before && value >= least && value <= most) return std::string();
    return fmt::format("'{}' is no whole number from {} to {}", text, least, most);
  };
}

Result<std::string> read_text_file(const std::string& path) {
  const auto source = METRALE_TRY(FileSource::open(path));
  if (source->size_bytes() > kMaxTextBytes) return too_long(path);
  std::string text(source->size_bytes(), '\0');
  METRALE_TRY(source->read(0, std::as_writable_bytes(std::span(text))));
  return text;
}

Result<std::string> read_standard_input() {
  std::string text;
  std::array<char, 1 << 16> buffer{};
  while (true) {
    const ssize_t got = ::read(STDIN_FILENO, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Error(Errc::io, fmt::format("standard input: {}", std::generic_category().message(errno)));
    if (got == 0) return text;
    text.append(buffer.data(), static_cast<std::size_t>(got));
    if (text.size() > kMaxTextBytes) return too_long("standard input");
  }
}

Result<std::unique_ptr<GpuBackend>> open_backend(const std::string& name, BackendOptions options) {
  for (const auto& table : host::kernel_tables()) options.host_kernels.push_back(table);
  const auto modules = cuda::kernel_modules();
  options.cuda_modules.insert(options.cuda_modules.begin(), modules.begin(), modules.end());
  return create_backend(name, options);
}

void print_json(const nlohmann::json& value, int indent) {
  fmt::print("{}\n", value.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace));
}

std::string one_line(std::string_view text) {
  std::string line;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    // C1 control characters are two bytes of UTF-8, C2 80 to C2 9F.
    const bool c1 = byte == 0xC2 && i + 1 < text.size() && (static_cast<unsigned char>(text[i + 1]) & 0xE0) == 0x80;
    if (byte < 0x20 || byte == 0x7F || c1) {
      line += fmt::format("\\x{:02x}", byte);
      if (c1) line += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[++i]));
    } else {
      line += text[i];
    }
  }
  return line;
}

ExitCode fail(const Error& error) {
  // The call site is for programmers; a user needs the kind, the message and what it happened under.
  std::string line = fmt::format("metgpu: {}: {}", to_string(error.code()), error.message());
  if (error.native_code() != 0) line += fmt::format(" [{}: {}]", error.native_code(), error.native_text());
  for (const std::string& note : error.notes()) line += "; " + note;
  fmt::print(stderr, "{}\n", one_line(line));
  return ExitCode::failed;
}

}  // namespace metrale::cli
