// SPDX-License-Identifier: Apache-2.0
//
// ByteSource: where a file parser gets its bytes. Parsers ask for ranges in rising order and know nothing of files, so the same
// code reads a file, a block of memory in a test, or a fuzzer's input. A source owns its descriptor or borrows its memory; reads
// name their own offset and keep no position, so several threads may read one source at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "metrale/result.h"

namespace metrale {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;

  /// What messages call this source: the path of a file.
  const std::string& label() const noexcept { return label_; }
  std::uint64_t size_bytes() const noexcept { return size_bytes_; }

  /// Fills `dst` with the bytes from `offset` on.
  /// Errors: out_of_range (the range leaves the source, nothing was read), io (the system refused, or the file shrank meanwhile;
  /// `dst` is unspecified).
  /// Threads: any.
  Result<> read(std::uint64_t offset, std::span<std::byte> dst) const;

  /// Tells the system that the range will not be read again, so that a load need not displace what else is cached. Only advice:
  /// sources without a cache ignore it, and so does a system that refuses.
  void drop_cached(std::uint64_t offset, std::uint64_t bytes) const noexcept { do_drop_cached(offset, bytes); }

 protected:
  ByteSource(std::string label, std::uint64_t size_bytes) : label_(std::move(label)), size_bytes_(size_bytes) {}

 private:
  virtual Result<> do_read(std::uint64_t offset, std::span<std::byte> dst) const = 0;
  virtual void do_drop_cached(std::uint64_t, std::uint64_t) const noexcept {}

  std::string label_;
  std::uint64_t size_bytes_;
};

/// A regular file, read with pread and announced to the system as sequential. It is never mapped: a page fault inside a copy to a
/// device costs more than the copy.
class FileSource final : public ByteSource {
 public:
  /// Opens `path` for reading.
  /// Errors: not_found (no such file), invalid_argument (a folder or device, not a file), io (the system's words).
  static Result<std::unique_ptr<FileSource>> open(const std::filesystem::path& path);
  ~FileSource() override;

 private:
  FileSource(std::string label, std::uint64_t size_bytes, int fd) : ByteSource(std::move(label), size_bytes), fd_(fd) {}
  Result<> do_read(std::uint64_t offset, std::span<std::byte> dst) const override;
  void do_drop_cached(std::uint64_t offset, std::uint64_t bytes) const noexcept override;

  int fd_;
};

/// Bytes in memory, borrowed: they must stay valid and unchanged while the source lives.
class MemorySource final : public ByteSource {
 public:
  explicit MemorySource(std::span<const std::byte> bytes, std::string label = "memory")
      : ByteSource(std::move(label), bytes.size()), bytes_(bytes) {}

 private:
  Result<> do_read(std::uint64_t offset, std::span<std::byte> dst) const override;

  std::span<const std::byte> bytes_;
};

}  // namespace metrale
