// SPDX-License-Identifier: Apache-2.0
#include "metrale/bridges/rendezvous.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <new>

#include "bridges/collective/rendezvous_parts.h"
#include "metrale/switches.h"

namespace metrale {
namespace {

constexpr std::uint64_t kMaxPort = 65535;

bool is_number(std::string_view text, std::uint64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return !text.empty() && error == std::errc() && end == text.data() + text.size();
}

/// The variable as a number below `limit`.
Result<std::uint64_t> number(const Environment& environment, const char* name, std::uint64_t limit) {
  const char* text = environment(name);
  std::uint64_t value = 0;
  if (text == nullptr)
    return Error(Errc::invalid_argument, fmt::format("{} is not set, and others that say where a process stands are", name));
  if (!is_number(text, value) || value >= limit)
    return Error(Errc::invalid_argument, fmt::format("{} is '{}', which is no whole number below {}", name, text, limit));
  return value;
}

}  // namespace

const char* process_environment(const char* name) {
  if (std::string_view(name) != "METRALE_RENDEZVOUS") return std::getenv(name);
  return switches().rendezvous.empty() ? nullptr : switches().rendezvous.c_str();
}

Result<std::optional<ProcessPlace>> process_place(const Environment& environment) {
  struct Names {
    const char* source;
    const char* rank;
    const char* size;
    const char* local_rank;
  };
  static constexpr Names kNames[] = {{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
                                     {"mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"}};
  for (const Names& names : kNames) {
    if (environment(names.rank) == nullptr) continue;
    ProcessPlace place;
    place.source = names.source;
    place.size = static_cast<std::uint32_t>(METRALE_TRY(number(environment, names.size, kMaxProcesses + 1)));
    if (place.size == 0) return Error(Errc::invalid_argument, fmt::format("{} is 0; a process is one of at least 1", names.size));
    place.rank = static_cast<std::uint32_t>(METRALE_TRY(number(environment, names.rank, place.size)));
    place.local_rank = environment(names.local_rank) == nullptr
                           ? place.rank
                           : static_cast<std::uint32_t>(METRALE_TRY(number(environment, names.local_rank, place.size)));
    if (const char* meeting = environment("METRALE_RENDEZVOUS")) {
      place.meeting = meeting;
    } else if (const char* address = environment("MASTER_ADDR")) {
      const std::uint64_t port = METRALE_TRY(number(environment, "MASTER_PORT", kMaxPort));
      place.meeting = fmt::format("tcp://{}:{}", address, port + 1);
    }
    return place;
  }
  return std::nullopt;
}

namespace detail {

std::string missing_ranks(const std::vector<bool>& is_there) {
  std::string list;
  std::size_t missing = 0;
  for (std::size_t rank = 0; rank < is_there.size(); ++rank) {
    if (is_there[rank]) continue;
    if (++missing <= 8) list += fmt::format("{}{}", list.empty() ? "" : ", ", rank);
  }
  if (missing > 8) list += fmt::format(" and {} more", missing - 8);
  return fmt::format("{} {}", missing == 1 ? "rank" : "ranks", list);
}

}  // namespace detail

Result<std::vector<std::byte>> share_bytes(const ProcessPlace& place, std::span<const std::byte> mine,
                                           std::chrono::milliseconds timeout) try {
  const auto wrong = [](std::string text) { return Error(Errc::invalid_argument, std::move(text)); };
  if (place.size == 0 || place.size > kMaxProcesses || place.rank >= place.size)
    return wrong(fmt::format("rank {} of {} processes; 1 to {} may meet", place.rank, place.size, kMaxProcesses));
  if (place.rank == 0 && (mine.empty() || mine.size() > kMaxSharedBytes))
    return wrong(fmt::format("rank 0 shares {} bytes; it may be 1 to {}", mine.size(), kMaxSharedBytes));
  if (timeout.count() <= 0) return wrong(fmt::format("{} ms to meet in; give the ranks time to come", timeout.count()));
  if (place.size == 1) return std::vector<std::byte>(mine.begin(), mine.end());
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const std::string_view meeting = place.meeting;
  if (meeting.starts_with("file://") && meeting.size() > 7)
    return detail::share_by_file(place, std::string(meeting.substr(7)), mine, deadline);
  if (meeting.starts_with("tcp://")) {
    std::string_view address = meeting.substr(6);
    const std::size_t colon = address.rfind(':');
    std::uint64_t port = 0;
    if (colon != std::string_view::npos && colon != 0 && is_number(address.substr(colon + 1), port) && port != 0 &&
        port <= kMaxPort) {
      address = address.substr(0, colon);
      if (address.starts_with('[') && address.ends_with(']')) address = address.substr(1, address.size() - 2);
      return detail::share_by_tcp(place, std::string(address), static_cast<std::uint16_t>(port), mine, deadline);
    }
  }
  return wrong(
      fmt::format("'{}' is no place for processes to meet; set METRALE_RENDEZVOUS to tcp://host:port or file:///path", meeting));
} catch (const std::bad_alloc&) {
  return Error::no_memory();
}

}  // namespace metrale
