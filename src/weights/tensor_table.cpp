// SPDX-License-Identifier: Apache-2.0
#include "weights/tensor_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

#include "core/text.h"

namespace metrale {
namespace {

// Edit distance, computed in one row. Names are short: the caller cuts them.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t above = row[j + 1];
      row[j + 1] = std::min({above + 1, row[j] + 1, diagonal + (a[i] == b[j] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

}  // namespace

std::uint64_t TensorInfo::num_elements() const noexcept {
  return std::accumulate(shape.begin(), shape.end(), std::uint64_t{1}, std::multiplies<>());
}

std::uint64_t TensorInfo::num_rows() const noexcept {
  if (shape.empty()) return 1;
  return std::accumulate(shape.begin(), shape.end() - 1, std::uint64_t{1}, std::multiplies<>());
}

Result<TensorTable> TensorTable::create(std::vector<TensorInfo> tensors, std::string_view label) {
  TensorTable table;
  // An empty tensor shares its offset with its successor and comes first.
  std::sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.file, a.offset, a.size_bytes, a.name) < std::tie(b.file, b.offset, b.size_bytes, b.name);
  });
  table.by_name_.resize(tensors.size());
  std::iota(table.by_name_.begin(), table.by_name_.end(), std::uint32_t{0});
  std::sort(table.by_name_.begin(), table.by_name_.end(),
            [&](std::uint32_t a, std::uint32_t b) { return tensors[a].name < tensors[b].name; });
  const auto twice = std::adjacent_find(table.by_name_.begin(), table.by_name_.end(),
                                        [&](std::uint32_t a, std::uint32_t b) { return tensors[a].name == tensors[b].name; });
  if (twice != table.by_name_.end()) {
    return Error(Errc::bad_format, fmt::format("{}: tensor {} occurs twice", label, detail::quote(tensors[*twice].name)));
  }
  table.tensors_ = std::move(tensors);
  return table;
}

const TensorInfo* TensorTable::find(std::string_view name) const noexcept {
  const auto at = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                   [&](std::uint32_t i, std::string_view wanted) { return tensors_[i].name < wanted; });
  return at != by_name_.end() && tensors_[*at].name == name ? &tensors_[*at] : nullptr;
}

std::uint64_t TensorTable::total_bytes() const noexcept {
  std::uint64_t total = 0;
  for (const TensorInfo& tensor : tensors_) total += tensor.size_bytes;
  return total;
}

std::vector<std::string> TensorTable::nearest(std::string_view name, std::size_t limit) const {
  std::vector<std::string_view> names;
  names.reserve(tensors_.size());
  for (const TensorInfo& tensor : tensors_) names.push_back(tensor.name);
  return weights::nearest_names(name, names, limit);
}

std::string shape_text(std::span<const std::uint64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

namespace weights {

std::optional<std::uint64_t> element_count(std::span<const std::uint64_t> shape) noexcept {
  // A zero dimension makes the product 0 only after every other one was checked, so that no later product of a part can overflow.
  std::uint64_t count = 1;
  bool empty = false;
  for (const std::uint64_t dim : shape) {
    if (dim == 0) {
      empty = true;
    } else if (count > std::numeric_limits<std::uint64_t>::max() / dim) {
      return std::nullopt;
    } else {
      count *= dim;
    }
  }
  return empty ? 0 : count;
}

Result<> check_no_overlap(std::span<const TensorInfo> tensors, std::string_view label) {
  const TensorInfo* last = nullptr;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.size_bytes == 0) continue;
    if (last != nullptr && tensor.offset < last->offset + last->size_bytes) {
      return Error(Errc::bad_format, fmt::format("{}: tensors {} and {} overlap at offset {}", label, detail::quote(last->name),
                                                 detail::quote(tensor.name), tensor.offset));
    }
    last = &tensor;
  }
  return {};
}

std::vector<std::string> nearest_names(std::string_view name, std::span<const std::string_view> names, std::size_t limit) {
  // Distances cost length squared; beyond this, names are compared by their beginning and count as far apart.
  constexpr std::size_t kCompared = 128;
  const std::string_view wanted = name.substr(0, kCompared);
  std::vector<std::pair<std::size_t, std::string_view>> ranked;
  ranked.reserve(names.size());
  for (const std::string_view candidate : names)
    ranked.emplace_back(edit_distance(wanted, candidate.substr(0, kCompared)), candidate);
  const std::size_t kept = std::min(limit, ranked.size());
  std::partial_sort(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(kept), ranked.end());
  std::vector<std::string> out;
  for (std::size_t i = 0; i < kept; ++i) out.emplace_back(ranked[i].second);
  return out;
}

bool natural_less(std::string_view a, std::string_view b) noexcept {
  const auto digit = [](std::string_view text, std::size_t i) { return i < text.size() && text[i] >= '0' && text[i] <= '9'; };
  // The run of digits at `i`, without leading zeros; `i` moves past it. Longer is larger, so no value is computed.
  const auto number = [&](std::string_view text, std::size_t& i) {
    while (digit(text, i) && text[i] == '0') ++i;
    const std::size_t first = i;
    while (digit(text, i)) ++i;
    return text.substr(first, i - first);
  };
  std::size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (digit(a, i) && digit(b, j)) {
      const std::string_view left = number(a, i);
      const std::string_view right = number(b, j);
      if (left.size() != right.size()) return left.size() < right.size();
      if (left != right) return left < right;
      continue;
    }
    if (a[i] != b[j]) return static_cast<unsigned char>(a[i]) < static_cast<unsigned char>(b[j]);
    ++i;
    ++j;
  }
  if (i < a.size() || j < b.size()) return i == a.size();
  return a < b;  // they differ in leading zeros only
}

std::string nearest_text(std::span<const std::string> names) {
  std::string out;
  for (const std::string& name : names) out.append(out.empty() ? "; nearest: " : ", ").append(detail::quote(name));
  return out;
}

}  // namespace weights
}  // namespace metrale
