// SPDX-License-Identifier: Apache-2.0
#include "weights/header_reader.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/text.h"

namespace metrale::weights {
namespace {
constexpr std::size_t kWindowBytes = std::size_t{64} << 10;
}

HeaderReader::HeaderReader(const ByteSource& source, std::uint64_t limit)
    : source_(source), end_(std::min(limit, source.size_bytes())) {}

Error HeaderReader::fail(Errc code, std::string_view problem) const {
  std::string where = fmt::format("{}: {}", source_.label(), context_.part);
  if (context_.count != 0) where += fmt::format(" {} of {}", context_.index + 1, context_.count);
  if (!context_.name.empty()) where.append(" ").append(detail::quote(context_.name));
  return Error(code, fmt::format("{}: {}", where, problem));
}

Result<> HeaderReader::refill() {
  window_start_ += window_.size();
  used_ = 0;
  const std::size_t take = static_cast<std::size_t>(std::min<std::uint64_t>(kWindowBytes, end_ - window_start_));
  window_.resize(take);
  Result<> got = source_.read(window_start_, window_);
  if (!got) window_.clear();
  return got;
}

Result<> HeaderReader::bytes(std::span<std::byte> dst) {
  if (dst.size() > remaining()) {
    const bool cut = end_ < source_.size_bytes();
    return fail(Errc::bad_format, cut ? fmt::format("the header exceeds the limit of {} bytes", end_)
                                      : fmt::format("truncated: {} bytes are needed at offset {}, the file has {} left", dst.size(),
                                                    position(), remaining()));
  }
  while (!dst.empty()) {
    if (used_ == window_.size()) METRALE_TRY(refill());
    const std::size_t take = std::min(dst.size(), window_.size() - used_);
    std::memcpy(dst.data(), window_.data() + used_, take);
    used_ += take;
    dst = dst.subspan(take);
  }
  return {};
}

Result<std::string> HeaderReader::string(std::uint64_t limit) {
  const std::uint64_t length = METRALE_TRY(value<std::uint64_t>());
  if (length > remaining()) {
    return fail(Errc::bad_format,
                fmt::format("a string of {} bytes at offset {} leaves the {} bytes that remain", length, position(), remaining()));
  }
  if (length > limit) return fail(Errc::bad_format, fmt::format("a name of {} bytes; the limit is {}", length, limit));
  std::string text(static_cast<std::size_t>(length), '\0');
  METRALE_TRY(bytes(std::as_writable_bytes(std::span(text))));
  return text;
}

Result<> HeaderReader::expect(std::uint64_t count, std::uint64_t least_bytes, std::string_view what) const {
  if (count <= remaining() / least_bytes) return {};
  return fail(Errc::bad_format, fmt::format("{} {} cannot fit in the {} bytes that remain", count, what, remaining()));
}

}  // namespace metrale::weights
