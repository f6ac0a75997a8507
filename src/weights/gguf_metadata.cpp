// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <array>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/text.h"
#include "metrale/gguf.h"

namespace metrale {
namespace {

// Indexed like the alternatives of GgufValue.
constexpr std::array<std::string_view, 12> kScalarNames{"u8",  "i8",   "u16",    "i16", "u32", "i32",
                                                        "f32", "bool", "string", "u64", "i64", "f64"};
static_assert(std::variant_size_v<GgufValue> == 2 * kScalarNames.size());

template <class T>
struct IsVector : std::false_type {};
template <class E>
struct IsVector<std::vector<E>> : std::true_type {};

template <class T>
concept Integer = std::is_integral_v<T> && !std::is_same_v<T, bool>;
template <class T>
concept Number = Integer<T> || std::is_floating_point_v<T>;

template <class T>
constexpr std::string_view wanted_name() {
  if constexpr (std::is_same_v<T, bool>) return "a boolean";
  if constexpr (std::is_same_v<T, std::string>) return "a string";
  if constexpr (std::is_floating_point_v<T>) return "a number";
  return "an integer";
}

Error mismatch(std::string_view label, std::string_view key, const GgufValue& value, std::string_view wanted) {
  return Error(Errc::bad_format,
               fmt::format("{}: metadata {} is {}, {} is needed", label, detail::quote(key), gguf_type_name(value), wanted));
}

}  // namespace

std::string gguf_type_name(const GgufValue& value) {
  const std::size_t i = value.index();
  if (i < kScalarNames.size()) return std::string(kScalarNames[i]);
  return fmt::format("array of {}", kScalarNames[i - kScalarNames.size()]);
}

const GgufValue* GgufMetadata::find(std::string_view key) const noexcept {
  const auto at = values_.find(key);
  return at == values_.end() ? nullptr : &at->second;
}

Result<const GgufValue*> GgufMetadata::require(std::string_view key) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return Error(Errc::not_found, fmt::format("{}: metadata {} is missing", label_, detail::quote(key)));
  return value;
}

template <class T>
Result<T> GgufMetadata::get(std::string_view key) const {
  const GgufValue* value = METRALE_TRY(require(key));
  return std::visit(
      [&]<class V>(const V& held) -> Result<T> {
        if constexpr (std::is_same_v<T, V>) {
          return held;
        } else if constexpr (Integer<T> && Integer<V>) {
          if (!std::in_range<T>(held)) {
            return Error(Errc::bad_format, fmt::format("{}: metadata {} is {}, which does not fit {} bits", label_,
                                                       detail::quote(key), held, std::numeric_limits<T>::digits));
          }
          return static_cast<T>(held);
        } else if constexpr (std::is_floating_point_v<T> && Number<V>) {
          return static_cast<T>(held);
        } else {
          return mismatch(label_, key, *value, wanted_name<T>());
        }
      },
      *value);
}

template Result<bool> GgufMetadata::get<bool>(std::string_view) const;
template Result<std::int32_t> GgufMetadata::get<std::int32_t>(std::string_view) const;
template Result<std::uint32_t> GgufMetadata::get<std::uint32_t>(std::string_view) const;
template Result<std::int64_t> GgufMetadata::get<std::int64_t>(std::string_view) const;
template Result<std::uint64_t> GgufMetadata::get<std::uint64_t>(std::string_view) const;
template Result<float> GgufMetadata::get<float>(std::string_view) const;
template Result<double> GgufMetadata::get<double>(std::string_view) const;
template Result<std::string> GgufMetadata::get<std::string>(std::string_view) const;

Result<std::span<const std::string>> GgufMetadata::strings(std::string_view key) const {
  const GgufValue* value = METRALE_TRY(require(key));
  const auto* held = std::get_if<std::vector<std::string>>(value);
  if (held == nullptr) return mismatch(label_, key, *value, "an array of strings");
  return std::span<const std::string>(*held);
}

Result<std::vector<std::int64_t>> GgufMetadata::ints(std::string_view key) const {
  const GgufValue* value = METRALE_TRY(require(key));
  return std::visit(
      [&]<class V>(const V& held) -> Result<std::vector<std::int64_t>> {
        if constexpr (IsVector<V>::value) {
          if constexpr (Integer<typename V::value_type>) {
            std::vector<std::int64_t> out;
            out.reserve(held.size());
            for (const auto element : held) {
              if (!std::in_range<std::int64_t>(element)) {
                return Error(Errc::bad_format, fmt::format("{}: metadata {} holds {}, which does not fit 63 bits", label_,
                                                           detail::quote(key), element));
              }
              out.push_back(static_cast<std::int64_t>(element));
            }
            return out;
          }
        }
        return mismatch(label_, key, *value, "an array of integers");
      },
      *value);
}

Result<std::vector<float>> GgufMetadata::floats(std::string_view key) const {
  const GgufValue* value = METRALE_TRY(require(key));
  return std::visit(
      [&]<class V>(const V& held) -> Result<std::vector<float>> {
        if constexpr (IsVector<V>::value) {
          if constexpr (Number<typename V::value_type>) return std::vector<float>(held.begin(), held.end());
        }
        return mismatch(label_, key, *value, "an array of numbers");
      },
      *value);
}

}  // namespace metrale
