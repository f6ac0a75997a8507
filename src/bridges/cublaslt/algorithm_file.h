// SPDX-License-Identifier: Apache-2.0
//
// Measured algorithms in a file, for later processes on the same device with the same driver and library. Text, a line for each
// plan: its key, the library's own 64 bytes, and a checksum. One thread at a time; other processes may write the same file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <unordered_map>

#include "bridges/cublaslt/plan.h"

namespace metrale::cublaslt {

class AlgorithmFile {
 public:
  /// Keeps nothing.
  AlgorithmFile() = default;
  /// Reads `folder`'s file for `identity`, a line of text. One that is damaged, or that says another identity, is ignored with a
  /// warning and written anew.
  AlgorithmFile(const std::string& folder, const std::string& identity);

  const std::filesystem::path& path() const noexcept { return path_; }
  std::size_t size() const noexcept { return algorithms_.size(); }
  std::optional<cublasLtMatmulAlgo_t> find(const Key& key) const;
  /// Adds one and writes the file, with what others have added meanwhile. A failure is logged once.
  void add(const Key& key, const cublasLtMatmulAlgo_t& algorithm);

 private:
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept { return key.hash(); }
  };
  using Algorithms = std::unordered_map<Key, cublasLtMatmulAlgo_t, Hash>;
  /// Why the file is not to be used; empty where it is, or where there is none.
  std::string read(Algorithms& into) const;
  bool write() const;

  std::filesystem::path path_;
  std::string identity_;
  Algorithms algorithms_;
  bool has_warned_ = false;
};

}  // namespace metrale::cublaslt
