// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/kernel_path.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <tuple>

#include <fmt/format.h>

namespace metrale::cuda {
namespace {

namespace fs = std::filesystem;

Result<std::vector<std::byte>> read_all(const fs::path& path) {
  std::error_code error;
  const std::uintmax_t size = fs::file_size(path, error);
  if (error) return Error(Errc::io, fmt::format("{}: {}", path.string(), error.message()));
  if (size == 0 || size > kMaxKernelFileBytes) {
    return Error(Errc::bad_format,
                 fmt::format("{} has {} bytes; a kernel module has 1 to {}", path.string(), size, kMaxKernelFileBytes));
  }
  std::vector<std::byte> bytes(size);
  std::ifstream file(path, std::ios::binary);
  if (!file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size))) {
    return Error(Errc::io, fmt::format("{} cannot be read to its end", path.string()));
  }
  return bytes;
}

}  // namespace

Result<std::vector<KernelFile>> read_kernel_path(const std::string& folder) {
  constexpr std::array<std::string_view, 3> kEndings{".fatbin", ".cubin", ".ptx"};
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    return Error(Errc::not_found, fmt::format("METRALE_KERNEL_PATH={} is no folder{}{}; name one, or unset it", folder,
                                              error ? ": " : "", error ? error.message() : ""));
  }
  std::vector<KernelFile> files;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    const std::size_t stop = name.find('.');
    if (stop == 0 || stop == std::string::npos) continue;
    if (std::find(kEndings.begin(), kEndings.end(), std::string_view(name).substr(stop)) == kEndings.end()) continue;
    files.push_back({name.substr(0, stop), it->path().string(), METRALE_TRY(read_all(it->path()))});
  }
  if (error) return Error(Errc::io, fmt::format("METRALE_KERNEL_PATH={}: {}", folder, error.message()));
  std::sort(files.begin(), files.end(),
            [](const KernelFile& a, const KernelFile& b) { return std::tie(a.name, a.path) < std::tie(b.name, b.path); });
  for (std::size_t i = 1; i < files.size(); ++i) {
    if (files[i].name != files[i - 1].name) continue;
    return Error(Errc::bad_format,
                 fmt::format("{} and {} are both module {}; keep one of them", files[i - 1].path, files[i].path, files[i].name));
  }
  return files;
}

}  // namespace metrale::cuda
