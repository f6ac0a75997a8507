// SPDX-License-Identifier: Apache-2.0
#include "metrale/weight_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_set>
#include <utility>

#include "core/text.h"
#include "metrale/dequantise.h"
#include "weights/tensor_table.h"

namespace metrale {
namespace {

using detail::quote;

// Type and size that `tensor` has on the device.
Result<std::pair<DType, std::uint64_t>> device_form(const TensorInfo& tensor, const std::optional<TensorTransform>& transform,
                                                    const WeightFile& file) {
  if (!tensor.dtype) {
    return Error(Errc::unsupported,
                 fmt::format("{}: tensor {} has type {}, which metrale cannot load; GGUF files may have F32, F16, "
                             "BF16, Q4_0, Q4_1, Q8_0, Q4_K and Q6_K",
                             file.file_label(tensor.file), quote(tensor.name), quote(tensor.type_name)));
  }
  if (!transform) return std::pair(*tensor.dtype, tensor.size_bytes);
  const auto refuse = [&](std::string_view why) {
    return Error(Errc::invalid_argument,
                 fmt::format("{}: transform of tensor {} {} to {}: {}", file.file_label(tensor.file), quote(tensor.name),
                             shape_text(tensor.shape), to_string(transform->dtype), why));
  };
  if (!transform->apply) return refuse("no function");
  if (transform->granule_rows == 0) return refuse("granule_rows is 0");
  if (!size_bytes(*tensor.dtype, tensor.num_cols())) return refuse("rows are no whole number of blocks of the source");
  if (!size_bytes(transform->dtype, tensor.num_cols())) return refuse("rows are no whole number of blocks of the result");
  const std::optional<std::uint64_t> bytes = size_bytes(transform->dtype, tensor.num_elements());
  if (!bytes) return refuse("the size overflows");
  return std::pair(transform->dtype, *bytes);
}

Result<> convert_rows(const TensorInfo& tensor, std::span<const std::byte> src, std::span<std::byte> dst, DType to) {
  // A few rows' worth at a time, so that the floats stay in cache; a whole number of blocks of every type.
  constexpr std::size_t kPart = 4096;
  const DTypeFacts& from = dtype_facts(*tensor.dtype);
  const std::size_t elements = src.size() / from.block_bytes * from.block_elements;
  float values[kPart];
  for (std::size_t at = 0; at < elements; at += kPart) {
    const std::size_t count = std::min(kPart, elements - at);
    const std::size_t first = at / from.block_elements * from.block_bytes;
    METRALE_TRY(
        dequantise(*tensor.dtype, src.subspan(first, count / from.block_elements * from.block_bytes), std::span(values, count)));
    if (to == DType::f32) {
      std::memcpy(dst.data() + at * sizeof(float), values, count * sizeof(float));
      continue;
    }
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint16_t bits = f32_to_bf16(values[i]);
      std::memcpy(dst.data() + (at + i) * sizeof(bits), &bits, sizeof(bits));
    }
  }
  return {};
}

/// The rows of `slice` as a tensor, and what cuts columns out of them where some are left out.
Result<> cut(const TensorSlice& slice, const WeightFile& file, TensorInfo& rows, TensorChoice& choice,
             std::vector<std::uint64_t>& shape) {
  const auto refuse = [&](std::string_view why) {
    return Error(Errc::invalid_argument, fmt::format("{}: slice of {} rows from {} and {} columns from {} of tensor {} {}: {}",
                                                     file.file_label(rows.file), slice.num_rows, slice.first_row, slice.num_cols,
                                                     slice.first_col, quote(rows.name), shape_text(rows.shape), why));
  };
  if (rows.shape.empty() || rows.shape.size() > 2) return refuse("only vectors and matrices are cut");
  if (choice.transform) return refuse("it has a transform too");
  const std::uint64_t all_rows = rows.num_rows(), all_cols = rows.num_cols();
  if (slice.num_rows == 0 || slice.num_cols == 0 || slice.first_row > all_rows || slice.num_rows > all_rows - slice.first_row ||
      slice.first_col > all_cols || slice.num_cols > all_cols - slice.first_col)
    return refuse("it is empty or leaves the tensor");
  if (!rows.dtype) return {};  // refused by its type afterwards
  const std::optional<std::uint64_t> row_bytes = size_bytes(*rows.dtype, all_cols);
  const std::optional<std::uint64_t> skipped = size_bytes(*rows.dtype, slice.first_col);
  const std::optional<std::uint64_t> kept = size_bytes(*rows.dtype, slice.num_cols);
  if (!row_bytes || !skipped || !kept) {
    return refuse(fmt::format("{} is stored in blocks of {} columns, and the slice cuts one", to_string(*rows.dtype),
                              dtype_facts(*rows.dtype).block_elements));
  }
  shape = rows.shape;
  shape.back() = slice.num_cols;
  if (shape.size() == 2) shape.front() = slice.num_rows;
  if (rows.shape.size() == 1) {
    rows.offset += *skipped;
    rows.shape = shape;
    rows.size_bytes = *kept;
    return {};
  }
  rows.offset += slice.first_row * *row_bytes;
  rows.shape.front() = slice.num_rows;
  rows.size_bytes = slice.num_rows * *row_bytes;
  if (slice.num_cols == all_cols) return {};
  choice.transform =
      TensorTransform{*rows.dtype, 1,
                      [row = *row_bytes, from = *skipped, bytes = *kept](
                          const TensorInfo&, std::uint64_t, std::span<const std::byte> src, std::span<std::byte> dst) -> Result<> {
                        for (std::uint64_t at = 0; (at + 1) * row <= src.size(); ++at)
                          std::memcpy(dst.data() + at * bytes, src.data() + at * row + from, bytes);
                        return {};
                      }};
  return {};
}

}  // namespace

TensorTransform convert_to(DType dtype) {
  return {dtype, 1,
          [dtype](const TensorInfo& tensor, std::uint64_t, std::span<const std::byte> src, std::span<std::byte> dst) -> Result<> {
            if (dtype != DType::f32 && dtype != DType::bf16) {
              return Error(Errc::unsupported, fmt::format("convert tensor {} to {}: f32 and bf16 are the types to convert to",
                                                          quote(tensor.name), to_string(dtype)));
            }
            return convert_rows(tensor, src, dst, dtype);
          }};
}

Result<WeightPlan> WeightPlan::create(const WeightFile& file, const TensorPolicy& policy) {
  const std::string label = file.path().native();
  return detail::guarded(label, [&]() -> Result<WeightPlan> {
    WeightPlan plan;
    plan.label_ = label;
    for (const TensorInfo& tensor : file.tensors().tensors()) {
      TensorChoice choice = policy ? policy(tensor) : TensorChoice{};
      if (choice.use == TensorUse::skip) {
        ++plan.num_skipped_;
        continue;
      }
      if (choice.use == TensorUse::defer) {
        plan.deferred_.push_back(&tensor);
        continue;
      }
      const TensorInfo* source = &tensor;
      std::vector<std::uint64_t> shape = tensor.shape;
      std::optional<std::uint64_t> part_bytes;
      if (choice.slice) {
        auto rows = std::make_shared<TensorInfo>(tensor);
        METRALE_TRY(cut(*choice.slice, file, *rows, choice, shape));
        if (rows->dtype) part_bytes = size_bytes(*rows->dtype, choice.slice->num_rows * choice.slice->num_cols);
        source = rows.get();
        plan.sliced_.push_back(std::move(rows));
      }
      const auto [dtype, whole_bytes] = METRALE_TRY(device_form(*source, choice.transform, file));
      const std::uint64_t bytes = part_bytes.value_or(whole_bytes);
      std::uint64_t offset = 0;
      if (bytes != 0) {
        std::uint64_t& end = plan.segments_[choice.segment];
        offset = end;
        if (bytes > std::numeric_limits<std::uint64_t>::max() / 2 - end) {
          return Error(Errc::out_of_range, fmt::format("{}: the weights overflow at tensor {}", label, quote(tensor.name)));
        }
        end = round_up(end + bytes, kDeviceAlignment);
      }
      plan.entries_.push_back({source, dtype, std::move(shape), bytes, choice.segment, offset, std::move(choice.transform)});
    }
    std::sort(plan.deferred_.begin(), plan.deferred_.end(),
              [](const TensorInfo* a, const TensorInfo* b) { return weights::natural_less(a->name, b->name); });
    return plan;
  });
}

Result<WeightPlan> WeightPlan::create(const WeightFile& file, std::span<const std::string> names) {
  std::unordered_set<std::string_view> wanted;
  for (const std::string& name : names) {
    METRALE_TRY(file.get(name));
    wanted.insert(name);
  }
  return create(file, [&](const TensorInfo& tensor) {
    TensorChoice choice;
    choice.use = wanted.contains(tensor.name) ? TensorUse::load : TensorUse::skip;
    return choice;
  });
}

std::uint64_t WeightPlan::device_bytes() const noexcept {
  std::uint64_t total = 0;
  for (const auto& [segment, bytes] : segments_) total += bytes;
  return total;
}

std::uint64_t WeightPlan::read_bytes() const noexcept {
  std::uint64_t total = 0;
  for (const Entry& entry : entries_) total += entry.tensor->size_bytes;
  return total;
}

Result<> WeightPlan::check_fits(GpuBackend& backend, std::uint64_t reserve_bytes) const {
  const std::uint64_t free = METRALE_TRY(backend.free_memory());
  const std::uint64_t needed = device_bytes();
  if (needed <= free && reserve_bytes <= free - needed) return {};
  return Error(Errc::out_of_memory,
               fmt::format("{}: weights of {} bytes and a reserve of {} do not fit the {} bytes that {} has free; "
                           "take a smaller model or free memory",
                           label_, needed, reserve_bytes, free, backend.name()));
}

}  // namespace metrale
