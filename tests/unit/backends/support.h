// SPDX-License-Identifier: Apache-2.0
//
// What the tests of backends share.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <span>
#include <vector>

#include "metrale/backend.h"

#define ASSERT_OK(result)                                                          \
  do {                                                                             \
    const auto& metrale_result = (result);                                         \
    ASSERT_TRUE(metrale_result.has_value()) << metrale_result.error().to_string(); \
  } while (false)
#define EXPECT_OK(result)                                                          \
  do {                                                                             \
    const auto& metrale_result = (result);                                         \
    EXPECT_TRUE(metrale_result.has_value()) << metrale_result.error().to_string(); \
  } while (false)
#define EXPECT_ERRC(result, errc)                                                         \
  do {                                                                                    \
    const auto& metrale_result = (result);                                                \
    ASSERT_FALSE(metrale_result.has_value());                                             \
    EXPECT_EQ(metrale_result.error().code(), errc) << metrale_result.error().to_string(); \
  } while (false)

namespace metrale::test {

/// The value of a result, or a thrown failure.
template <class T>
T take(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().to_string());
  return std::move(*result);
}
inline void take(const Result<>& result) {
  if (!result) throw std::runtime_error(result.error().to_string());
}

/// Keeps a stream busy until it is opened. Opened on destruction.
class Gate {
 public:
  Gate(GpuBackend& backend, StreamHandle stream) {
    take(backend.enqueue_host(stream, [opened = opened_.get_future().share()] { opened.wait(); }));
  }
  ~Gate() { open(); }
  void open() {
    if (!is_open_) opened_.set_value();
    is_open_ = true;
  }

 private:
  std::promise<void> opened_;
  bool is_open_ = false;
};

inline std::span<const std::byte> bytes_of(const std::vector<std::uint32_t>& words) { return std::as_bytes(std::span(words)); }
inline std::span<std::byte> bytes_of(std::vector<std::uint32_t>& words) { return std::as_writable_bytes(std::span(words)); }

/// `n` words of device memory, read when the stream has come to here.
inline std::vector<std::uint32_t> read_words(GpuBackend& backend, DevicePtr ptr, std::size_t n, StreamHandle stream) {
  std::vector<std::uint32_t> words(n);
  take(backend.copy_d2h_on_stream(bytes_of(words), ptr, stream));
  return words;
}

}  // namespace metrale::test
