// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_set>

#include <fmt/format.h>

#include "metrale/alloc_ledger.h"

namespace metrale {
namespace {

constexpr std::uint64_t kChunkBytes = std::uint64_t{2} << 20;

double mib(std::uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

void append_heading(std::string& text, std::string_view heading, const std::vector<Allocation>& blocks, MemoryKind kind) {
  std::uint64_t count = 0;
  std::uint64_t bytes = 0;
  for (const Allocation& block : blocks) {
    if (block.kind == kind) ++count, bytes += block.bytes;
  }
  if (count > 0) text += fmt::format("{}: {:.1f} MiB in {} blocks\n", heading, mib(bytes), count);
}

}  // namespace

std::vector<SiteUse> uses_by_site(const std::vector<Allocation>& blocks) {
  std::map<std::tuple<std::string_view, std::uint32_t, std::uint32_t>, SiteUse> by_site;
  for (const Allocation& block : blocks) {
    SiteUse& use = by_site[{block.site.file_name(), block.site.line(), block.site.column()}];
    use.site = block.site;
    ++use.count;
    use.bytes += block.bytes;
  }
  std::vector<SiteUse> uses;
  for (const auto& [key, use] : by_site) uses.push_back(use);
  std::sort(uses.begin(), uses.end(), [](const SiteUse& a, const SiteUse& b) {
    const auto rank = [](const SiteUse& use) {
      return std::tuple(std::string_view(use.site.file_name()), use.site.line(), use.site.column());
    };
    return a.bytes != b.bytes ? a.bytes > b.bytes : rank(a) < rank(b);
  });
  return uses;
}

std::vector<OwnerUse> uses_by_owner(const std::vector<Allocation>& blocks) {
  std::map<std::string_view, OwnerUse> by_owner;
  for (const Allocation& block : blocks) {
    OwnerUse& use = by_owner[block.owner];
    use.owner = block.owner;
    ++use.count;
    use.bytes += block.bytes;
  }
  std::vector<OwnerUse> uses;
  for (const auto& [owner, use] : by_owner) uses.push_back(use);
  std::sort(uses.begin(), uses.end(),
            [](const OwnerUse& a, const OwnerUse& b) { return a.bytes != b.bytes ? a.bytes > b.bytes : a.owner < b.owner; });
  return uses;
}

std::string format_alloc_report(const std::vector<Allocation>& blocks, std::size_t top_n, std::uint64_t min_mb) {
  std::vector<Allocation> live;
  std::copy_if(blocks.begin(), blocks.end(), std::back_inserter(live), [](const Allocation& b) { return counts_as_live(b.kind); });
  const std::vector<SiteUse> uses = uses_by_site(live);
  std::uint64_t total = 0;
  for (const SiteUse& use : uses) total += use.bytes;

  std::string text = fmt::format("live device memory: {:.3f} GB in {} blocks from {} sites\n", static_cast<double>(total) / 1e9,
                                 live.size(), uses.size());
  std::uint64_t rest_bytes = 0;
  std::size_t rest_sites = 0;
  std::size_t shown = 0;
  for (const SiteUse& use : uses) {
    if (shown < top_n && use.bytes >= min_mb << 20) {
      ++shown;
      text += fmt::format("  {:9.1f} MiB x {:<6} {}:{}\n", mib(use.bytes), use.count, use.site.file_name(), use.site.line());
    } else {
      rest_bytes += use.bytes;
      ++rest_sites;
    }
  }
  if (rest_sites > 0) text += fmt::format("  {:9.1f} MiB in {} more sites\n", mib(rest_bytes), rest_sites);

  std::map<std::string_view, std::uint64_t> by_file;
  for (const SiteUse& use : uses) by_file[use.site.file_name()] += use.bytes;
  std::vector<std::pair<std::string_view, std::uint64_t>> files(by_file.begin(), by_file.end());
  std::sort(files.begin(), files.end(),
            [](const auto& a, const auto& b) { return a.second != b.second ? a.second > b.second : a.first < b.first; });
  if (files.size() > top_n) files.resize(top_n);
  if (!files.empty()) text += "by file:\n";
  for (const auto& [file, bytes] : files) text += fmt::format("  {:9.1f} MiB {}\n", mib(bytes), file);

  if (!blocks.empty()) text += "by owner, everything known:\n";
  for (const OwnerUse& use : uses_by_owner(blocks)) {
    text += fmt::format("  {:9.1f} MiB x {:<6} {}\n", mib(use.bytes), use.count, use.owner.empty() ? "(no owner)" : use.owner);
  }

  append_heading(text, "arenas", blocks, MemoryKind::arena);
  append_heading(text, "pinned host memory", blocks, MemoryKind::pinned);
  append_heading(text, "registered host memory", blocks, MemoryKind::registered);
  append_heading(text, "adopted from other libraries", blocks, MemoryKind::adopted);
  append_heading(text, "kernel module globals", blocks, MemoryKind::module_symbol);
  return text;
}

std::uint64_t chunk_slack_bytes(const std::vector<Allocation>& blocks) {
  std::unordered_set<std::uint64_t> chunks;
  std::uint64_t used = 0;
  for (const Allocation& block : blocks) {
    if (block.bytes == 0 || block.bytes >= kChunkBytes) continue;
    used += block.bytes;
    for (std::uint64_t c = block.base.address / kChunkBytes; c <= (block.base.address + block.bytes - 1) / kChunkBytes; ++c) {
      chunks.insert(c);
    }
  }
  const std::uint64_t held = chunks.size() * kChunkBytes;
  return held > used ? held - used : 0;
}

}  // namespace metrale
