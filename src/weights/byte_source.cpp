// SPDX-License-Identifier: Apache-2.0
#include "metrale/byte_source.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "core/text.h"

namespace metrale {
namespace {

Error system_error(Errc code, std::string_view what, int number) {
  return Error(code, fmt::format("{}: {}", what, std::generic_category().message(number)));
}

}  // namespace

Result<> ByteSource::read(std::uint64_t offset, std::span<std::byte> dst) const {
  if (offset > size_bytes_ || dst.size() > size_bytes_ - offset) {
    return Error(Errc::out_of_range,
                 fmt::format("{}: a read of {} bytes at offset {} leaves its {} bytes", label_, dst.size(), offset, size_bytes_));
  }
  if (dst.empty()) return {};
  return do_read(offset, dst);
}

Result<std::unique_ptr<FileSource>> FileSource::open(const std::filesystem::path& path) {
  return detail::guarded(path.native(), [&]() -> Result<std::unique_ptr<FileSource>> {
    // A named pipe would block in open, and a device may act on it: look first, and once more at what was opened.
    struct stat status{};
    if (::stat(path.c_str(), &status) != 0) {
      const int number = errno;
      if (number == ENOENT || number == ENOTDIR) return Error(Errc::not_found, fmt::format("{}: no such file", path.native()));
      return system_error(Errc::io, path.native(), number);
    }
    if (!S_ISREG(status.st_mode)) {
      return Error(Errc::invalid_argument,
                   fmt::format("{}: {}, not a file", path.native(), S_ISDIR(status.st_mode) ? "a folder" : "a device or pipe"));
    }
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return system_error(Errc::io, path.native(), errno);
    if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
      ::close(fd);
      return Error(Errc::io, fmt::format("{}: changed while it was opened", path.native()));
    }
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    return std::unique_ptr<FileSource>(new FileSource(path.native(), static_cast<std::uint64_t>(status.st_size), fd));
  });
}

FileSource::~FileSource() { ::close(fd_); }

Result<> FileSource::do_read(std::uint64_t offset, std::span<std::byte> dst) const {
  // Linux moves at most 0x7ffff000 bytes a call.
  constexpr std::size_t kMostPerCall = std::size_t{1} << 30;
  while (!dst.empty()) {
    const ssize_t got = ::pread(fd_, dst.data(), std::min(dst.size(), kMostPerCall), static_cast<off_t>(offset));
    if (got < 0) {
      if (errno == EINTR) continue;
      return system_error(Errc::io, fmt::format("{}: read at offset {}", label(), offset), errno);
    }
    if (got == 0) {
      return Error(Errc::io,
                   fmt::format("{}: ends at offset {}, it had {} bytes when it was opened", label(), offset, size_bytes()));
    }
    dst = dst.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
  return {};
}

void FileSource::do_drop_cached(std::uint64_t offset, std::uint64_t bytes) const noexcept {
  ::posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
}

Result<> MemorySource::do_read(std::uint64_t offset, std::span<std::byte> dst) const {
  std::memcpy(dst.data(), bytes_.data() + offset, dst.size());
  return {};
}

}  // namespace metrale
