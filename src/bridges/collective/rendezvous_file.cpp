// SPDX-License-Identifier: Apache-2.0
//
// Meeting at a file. Rank r leaves its word in `path.rank<r>`; rank 0 writes its bytes with the words it has seen into `path`, each
// time by renaming a finished file; a rank that finds its word there takes the bytes and removes its note, which tells rank 0.
// Notes and files of earlier starts hold other words: they are overwritten, or never match.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <random>
#include <system_error>
#include <thread>

#include "bridges/collective/rendezvous_parts.h"

namespace metrale::detail {
namespace {

constexpr auto kPause = std::chrono::milliseconds(5);
constexpr std::uint64_t kMagic = 0x6d65'7472'616c'6501;  // "metrale", form 1

/// What starts the file; then the words, one a rank (0: not seen), then the bytes.
struct Head {
  std::uint64_t magic = kMagic;
  std::uint32_t size = 0;
  std::uint32_t num_bytes = 0;
};
struct Note {
  std::uint64_t magic = kMagic;
  std::uint64_t word = 0;
  std::uint32_t size = 0;
  std::uint32_t rank = 0;
};

Error system_error(std::string_view what, const std::string& path) {
  return Error(Errc::io, fmt::format("{} {}: {}", what, path, std::generic_category().message(errno)));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const noexcept { return fd_; }

 private:
  int fd_;
};

/// Puts a file with these bytes at `path`, whole or not at all.
Result<> publish(const std::string& path, std::span<const std::byte> bytes) {
  const std::string draft = fmt::format("{}.draft.{}", path, ::getpid());
  ::unlink(draft.c_str());  // of a process that is no more
  {
    const Descriptor file(::open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (file.get() < 0) return system_error("create", draft);
    while (!bytes.empty()) {
      const ssize_t put = ::write(file.get(), bytes.data(), bytes.size());
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) {
        Error error = system_error("write", draft);
        ::unlink(draft.c_str());
        return error;
      }
      bytes = bytes.subspan(static_cast<std::size_t>(put));
    }
  }
  if (::rename(draft.c_str(), path.c_str()) == 0) return {};
  Error error = system_error("rename to", path);
  ::unlink(draft.c_str());
  return error;
}

/// What is at `path`, up to `most` bytes; empty where there is nothing.
Result<std::vector<std::byte>> look(const std::string& path, std::size_t most) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0 && errno == ENOENT) return std::vector<std::byte>();
  if (file.get() < 0) return system_error("open", path);
  std::vector<std::byte> bytes(most);
  std::size_t have = 0;
  while (have < most) {
    const ssize_t got = ::read(file.get(), bytes.data() + have, most - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return system_error("read", path);
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  bytes.resize(have);
  return bytes;
}

std::uint64_t fresh_word() {
  std::random_device random;
  std::uint64_t word = 0;
  while (word == 0) word = (std::uint64_t{random()} << 32) | random();
  return word;
}

template <class T>
std::span<const std::byte> raw(const T& value) {
  return std::as_bytes(std::span<const T, 1>(&value, 1));
}

/// Removes a file at the end, however that comes.
class Cleanup {
 public:
  explicit Cleanup(std::string path) : path_(std::move(path)) {}
  ~Cleanup() { ::unlink(path_.c_str()); }
  Cleanup(const Cleanup&) = delete;
  Cleanup& operator=(const Cleanup&) = delete;

 private:
  std::string path_;
};

Result<std::vector<std::byte>> host(const ProcessPlace& place, const std::string& path, std::span<const std::byte> mine,
                                    Deadline deadline) {
  const Cleanup at_the_end(path);
  std::vector<std::uint64_t> words(place.size, 0);
  // Rank r has taken the bytes when the note whose word was published is gone.
  std::vector<bool> has_taken(place.size, false);
  has_taken[0] = true;
  ::unlink(path.c_str());  // of an earlier start
  while (true) {
    bool changed = false;
    for (std::uint32_t rank = 1; rank < place.size; ++rank) {
      const std::string note_path = fmt::format("{}.rank{}", path, rank);
      const std::vector<std::byte> bytes = METRALE_TRY(look(note_path, sizeof(Note)));
      if (bytes.empty()) {
        if (words[rank] != 0) has_taken[rank] = true;
        continue;
      }
      Note note;
      if (bytes.size() != sizeof(note)) continue;
      std::memcpy(&note, bytes.data(), sizeof(note));
      if (note.magic != kMagic || note.rank != rank || note.word == words[rank]) continue;
      if (note.size != place.size) continue;  // maybe of an earlier start; its own rank will find the sizes differ
      words[rank] = note.word;
      has_taken[rank] = false;
      changed = true;
    }
    if (std::ranges::find(has_taken, false) == has_taken.end()) return std::vector<std::byte>(mine.begin(), mine.end());
    // Whoever gets the bytes may begin, so nobody does before all have come.
    if (changed && std::ranges::find(words.begin() + 1, words.end(), 0U) == words.end()) {
      std::vector<std::byte> file;
      const Head head{.magic = kMagic, .size = place.size, .num_bytes = static_cast<std::uint32_t>(mine.size())};
      const auto add = [&](std::span<const std::byte> part) { file.insert(file.end(), part.begin(), part.end()); };
      add(raw(head));
      add(std::as_bytes(std::span(words)));
      add(mine);
      METRALE_TRY(publish(path, file));
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      std::vector<bool> has_come(place.size);
      for (std::uint32_t rank = 0; rank < place.size; ++rank) has_come[rank] = rank == 0 || words[rank] != 0;
      const bool all = std::ranges::find(has_come, false) == has_come.end();
      return Error(Errc::timeout, fmt::format("{} of {} did not {} {} in time", missing_ranks(all ? has_taken : has_come),
                                              place.size, all ? "read" : "come to", path));
    }
    std::this_thread::sleep_for(kPause);
  }
}

Result<std::vector<std::byte>> guest(const ProcessPlace& place, const std::string& path, Deadline deadline) {
  const std::string note_path = fmt::format("{}.rank{}", path, place.rank);
  const Note note{.magic = kMagic, .word = fresh_word(), .size = place.size, .rank = place.rank};
  const Cleanup at_the_end(note_path);
  METRALE_TRY(publish(note_path, raw(note)));
  const std::size_t most = sizeof(Head) + kMaxProcesses * sizeof(std::uint64_t) + kMaxSharedBytes;
  bool saw_another = false;
  while (true) {
    const std::vector<std::byte> bytes = METRALE_TRY(look(path, most));
    Head head;
    if (bytes.size() >= sizeof(head)) {
      std::memcpy(&head, bytes.data(), sizeof(head));
      const std::size_t words_end = sizeof(head) + std::size_t{place.size} * sizeof(std::uint64_t);
      if (head.magic == kMagic && head.size == place.size && bytes.size() == words_end + head.num_bytes) {
        std::uint64_t word = 0;
        std::memcpy(&word, bytes.data() + sizeof(head) + place.rank * sizeof(word), sizeof(word));
        if (word == note.word) return std::vector<std::byte>(bytes.begin() + static_cast<std::ptrdiff_t>(words_end), bytes.end());
      }
      saw_another = true;
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      return Error(Errc::timeout, saw_another
                                      ? fmt::format("{} is of another start, or of one with other than {} processes; rank 0 of "
                                                    "this one did not come in time",
                                                    path, place.size)
                                      : fmt::format("rank 0 did not come to {} in time, or not all of {} ranks", path, place.size));
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

Result<std::vector<std::byte>> share_by_file(const ProcessPlace& place, const std::string& path, std::span<const std::byte> mine,
                                             Deadline deadline) {
  return place.rank == 0 ? host(place, path, mine, deadline) : guest(place, path, deadline);
}

}  // namespace metrale::detail
