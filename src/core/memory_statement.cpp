// SPDX-License-Identifier: Apache-2.0
#include "metrale/memory_statement.h"

#include <unistd.h>

#include <array>
#include <fstream>

#include <fmt/format.h>

namespace metrale {
namespace {

double mib(double bytes) { return bytes / (1 << 20); }

/// Resident bytes of this process; 0 where the system does not tell.
std::uint64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::uint64_t total_pages = 0;
  std::uint64_t resident_pages = 0;
  statm >> total_pages >> resident_pages;
  return resident_pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

Result<MemoryStatement> memory_statement(GpuBackend& backend) {
  MemoryStatement statement;
  const std::vector<Allocation> blocks = backend.live_allocations();
  constexpr std::array kKinds{MemoryKind::device, MemoryKind::managed,    MemoryKind::pooled,       MemoryKind::arena,
                              MemoryKind::pinned, MemoryKind::registered, MemoryKind::module_symbol};
  for (const MemoryKind kind : kKinds) {
    MemoryStatement::Line line{std::string(to_string(kind)), 0, 0};
    for (const Allocation& block : blocks) {
      if (block.kind == kind) line.bytes += block.bytes, ++line.blocks;
    }
    if (line.blocks != 0) statement.explained.push_back(line);
  }
  for (const auto& [label, block] : backend.adopted_memory()) {
    statement.explained.push_back({fmt::format("adopted from {}", label), block.bytes, 1});
  }
  std::uint64_t pooled = 0;
  for (const Allocation& block : blocks) pooled += block.kind == MemoryKind::pooled ? block.bytes : 0;
  if (const std::uint64_t reserved = backend.pool_reserved_bytes(); reserved > pooled) {
    statement.explained.push_back({"pool reserve not in use", reserved - pooled, 0});
  }
  for (const MemoryStatement::Line& line : statement.explained) statement.explained_bytes += line.bytes;
  statement.owners = uses_by_owner(blocks);
  statement.sites = uses_by_site(blocks);

  if (backend.shares_host_memory()) {
    statement.held_bytes = resident_bytes();
    statement.held_by = "resident memory of this process";
    statement.residual_means = "code, heap and stacks, less blocks never touched";
  } else {
    statement.held_bytes = METRALE_TRY(backend.total_memory()) - METRALE_TRY(backend.device_free_memory());
    statement.held_by = "used memory of the device";
    statement.residual_means = "contexts, kernel modules, libraries, other processes";
  }
  statement.residual_bytes = static_cast<std::int64_t>(statement.held_bytes) - static_cast<std::int64_t>(statement.explained_bytes);
  return statement;
}

std::string MemoryStatement::to_string() const {
  std::string text = fmt::format("{:10.1f} MiB held: {}\n", mib(static_cast<double>(held_bytes)), held_by);
  for (const Line& line : explained) {
    text += fmt::format("{:10.1f} MiB {}", mib(static_cast<double>(line.bytes)), line.what);
    text += line.blocks == 0 ? "\n" : fmt::format(", {} blocks\n", line.blocks);
  }
  text += fmt::format("{:10.1f} MiB residual: {}\n", mib(static_cast<double>(residual_bytes)), residual_means);
  text += "by owner\n";
  for (const OwnerUse& use : owners) {
    text += fmt::format("{:10.1f} MiB {}, {} blocks\n", mib(static_cast<double>(use.bytes)),
                        use.owner.empty() ? "(no owner)" : use.owner, use.count);
  }
  text += "by call site\n";
  for (const SiteUse& use : sites) {
    text += fmt::format("{:10.1f} MiB {}:{}, {} blocks\n", mib(static_cast<double>(use.bytes)), use.site.file_name(),
                        use.site.line(), use.count);
  }
  return text;
}

}  // namespace metrale
