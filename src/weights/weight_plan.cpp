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
      const auto [dtype, bytes] = METRALE_TRY(device_form(tensor, choice.transform, file));
      std::uint64_t offset = 0;
      if (bytes != 0) {
        std::uint64_t& end = plan.segments_[choice.segment];
        offset = end;
        if (bytes > std::numeric_limits<std::uint64_t>::max() / 2 - end) {
          return Error(Errc::out_of_range, fmt::format("{}: the weights overflow at tensor {}", label, quote(tensor.name)));
        }
        end = round_up(end + bytes, kDeviceAlignment);
      }
      plan.entries_.push_back({&tensor, dtype, bytes, choice.segment, offset, std::move(choice.transform)});
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
    return TensorChoice{wanted.contains(tensor.name) ? TensorUse::load : TensorUse::skip, 0, std::nullopt};
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
