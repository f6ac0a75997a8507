// SPDX-License-Identifier: Apache-2.0
//
// Attention on two sides: random sequences in a paged cache whose every other byte is NaN, or in packed rows, and the answer in
// float64. One thread; the reference uses all.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <source_location>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "metrale/bridges/flashinfer.h"
#include "metrale/device_buffer.h"
#include "metrale/kv_cache.h"

namespace metrale::test {

template <class T>
T must(Result<T> result, std::source_location site = std::source_location::current()) {
  if (!result) {
    ADD_FAILURE_AT(site.file_name(), static_cast<int>(site.line())) << result.error().to_string();
    throw std::runtime_error(result.error().to_string());
  }
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

inline float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
inline std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/// Calls `body(i)` for each i below `count` on all threads of the machine.
template <class Body>
void for_each_index(std::size_t count, const Body& body) {
  std::atomic<std::size_t> next{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::max(1U, std::thread::hardware_concurrency()); ++t) {
    threads.emplace_back([&] {
      for (std::size_t i = next++; i < count; i = next++) body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// ‖a − b‖ / ‖b‖ and ‖a‖ / ‖b‖; NaN where either has one.
struct Distance {
  double relative = 0;
  double norms = 0;
};
template <class A, class B>
Distance distance(const std::vector<A>& a, const std::vector<B>& b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, of_a = 0, of_b = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double x = a[i], y = b[i];
    difference += (x - y) * (x - y);
    of_a += x * x;
    of_b += y * y;
  }
  return {.relative = std::sqrt(difference / of_b), .norms = std::sqrt(of_a / of_b)};
}

struct Lengths {
  std::uint32_t kv = 0;
  std::uint32_t q = 1;
};

/// Random data of a batch, and what attention makes of it.
class AttentionCase {
 public:
  AttentionCase(const flashinfer::AttentionShape& shape, std::vector<Lengths> lengths, std::uint32_t seed)
      : shape_(shape), lengths_(std::move(lengths)), random_(seed) {
    for (const Lengths& length : lengths_) {
      q_rows_ += length.q;
      kv_rows_ += length.kv;
    }
    q_ = values(std::size_t{q_rows_} * shape_.num_q_heads * shape_.head_dim, 1.5F);
    k_ = values(std::size_t{kv_rows_} * kv_row(), 1);
    v_ = values(std::size_t{kv_rows_} * kv_row(), 1);
    // A mean, so that an output of zeros or of another sequence is far away.
    for (std::size_t i = 0; i < v_.size(); ++i) v_[i] = to_bf16(from_bf16(v_[i]) + 0.25F * static_cast<float>(i % 7));
  }

  const std::vector<Lengths>& lengths() const { return lengths_; }
  std::uint32_t q_rows() const { return q_rows_; }
  std::uint32_t kv_rows() const { return kv_rows_; }
  std::uint32_t q_row() const { return shape_.num_q_heads * shape_.head_dim; }
  std::uint32_t kv_row() const { return shape_.num_kv_heads * shape_.head_dim; }
  const std::vector<std::uint16_t>& q() const { return q_; }
  const std::vector<std::uint16_t>& k() const { return k_; }
  const std::vector<std::uint16_t>& v() const { return v_; }

  /// Output [q_rows, heads, dim] and logarithms to base 2 [q_rows, heads].
  void reference(std::vector<double>& out, std::vector<double>& lse) const {
    out.assign(q_.size(), 0);
    lse.assign(std::size_t{q_rows_} * shape_.num_q_heads, 0);
    struct Row {
      std::uint32_t q, kv_begin, kv_end;
    };
    std::vector<Row> rows;
    std::uint32_t q_at = 0, kv_at = 0;
    for (const Lengths& length : lengths_) {
      for (std::uint32_t i = 0; i < length.q; ++i) {
        const std::uint32_t own = length.kv - length.q + i;  // the key of this query
        const std::uint32_t end = shape_.causal ? own + 1 : length.kv;
        const std::uint32_t begin = shape_.window > 0 && own + 1 > shape_.window ? own + 1 - shape_.window : 0;
        rows.push_back({q_at + i, kv_at + begin, kv_at + end});
      }
      q_at += length.q;
      kv_at += length.kv;
    }
    const std::uint32_t dim = shape_.head_dim;
    const std::uint32_t group = shape_.num_q_heads / shape_.num_kv_heads;
    const double scale = shape_.scale > 0 ? shape_.scale : 1 / std::sqrt(static_cast<double>(dim));
    for_each_index(rows.size(), [&](std::size_t r) {
      const Row& row = rows[r];
      std::vector<double> scores(row.kv_end - row.kv_begin);
      for (std::uint32_t h = 0; h < shape_.num_q_heads; ++h) {
        const std::uint16_t* query = &q_[(std::size_t{row.q} * shape_.num_q_heads + h) * dim];
        double largest = -INFINITY;
        for (std::uint32_t t = row.kv_begin; t < row.kv_end; ++t) {
          const std::uint16_t* key = &k_[std::size_t{t} * kv_row() + h / group * dim];
          double score = 0;
          for (std::uint32_t i = 0; i < dim; ++i) score += static_cast<double>(from_bf16(query[i])) * from_bf16(key[i]);
          score *= scale;
          if (shape_.soft_cap > 0) score = shape_.soft_cap * std::tanh(score / shape_.soft_cap);
          scores[t - row.kv_begin] = score;
          largest = std::max(largest, score);
        }
        double sum = 0;
        double* answer = &out[(std::size_t{row.q} * shape_.num_q_heads + h) * dim];
        for (std::uint32_t t = row.kv_begin; t < row.kv_end; ++t) {
          const double weight = std::exp(scores[t - row.kv_begin] - largest);
          const std::uint16_t* value = &v_[std::size_t{t} * kv_row() + h / group * dim];
          for (std::uint32_t i = 0; i < dim; ++i) answer[i] += weight * from_bf16(value[i]);
          sum += weight;
        }
        for (std::uint32_t i = 0; i < dim; ++i) answer[i] /= sum;
        lse[std::size_t{row.q} * shape_.num_q_heads + h] = (largest + std::log(sum)) / std::log(2.0);
      }
    });
  }

 private:
  std::vector<std::uint16_t> values(std::size_t count, float scale) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<std::uint16_t> all(count);
    for (std::uint16_t& one : all) one = to_bf16(normal(random_));
    return all;
  }

  flashinfer::AttentionShape shape_;
  std::vector<Lengths> lengths_;
  std::mt19937 random_;
  std::uint32_t q_rows_ = 0;
  std::uint32_t kv_rows_ = 0;
  std::vector<std::uint16_t> q_, k_, v_;
};

/// Memory with contents, and a NaN row behind them.
class Filled {
 public:
  template <class T>
  Filled(GpuBackend& backend, const std::vector<T>& values) : Filled(backend, values.size() * sizeof(T)) {
    must(backend.copy_h2d(memory_.ptr(), std::as_bytes(std::span(values))));
  }
  /// NaN alone.
  Filled(GpuBackend& backend, std::uint64_t bytes) : backend_(&backend), bytes_(bytes) {
    memory_ = must(DeviceBuffer::create(backend, round_up(bytes, kDeviceAlignment) + kGuard));
    poison();
  }
  void poison() { must(backend_->memset(memory_.ptr(), 0xFF, memory_.size_bytes())); }
  DevicePtr ptr() const { return memory_.ptr(); }
  template <class T>
  std::vector<T> read(StreamHandle stream) const {
    std::vector<T> values(bytes_ / sizeof(T));
    must(backend_->copy_d2h_on_stream(std::as_writable_bytes(std::span(values)), memory_.ptr(), stream));
    std::vector<std::uint8_t> behind(memory_.size_bytes() - bytes_);
    must(backend_->copy_d2h(std::as_writable_bytes(std::span(behind)), memory_.ptr().offset(bytes_)));
    EXPECT_TRUE(std::ranges::all_of(behind, [](std::uint8_t byte) { return byte == 0xFF; })) << "written behind the end";
    return values;
  }
  std::vector<float> read_bf16(StreamHandle stream) const {
    std::vector<float> values;
    for (const std::uint16_t bits : read<std::uint16_t>(stream)) values.push_back(from_bf16(bits));
    return values;
  }

 private:
  static constexpr std::uint64_t kGuard = 4'096;
  GpuBackend* backend_;
  std::uint64_t bytes_;
  DeviceBuffer memory_;
};

/// A cache with shuffled tables that hold the keys and values of a case; all else in it is NaN.
class FilledCache {
 public:
  /// Tokens with a query are left out when `without_queries`: they are to be appended. `layer` of two is used.
  FilledCache(GpuBackend& backend, const flashinfer::AttentionShape& shape, const AttentionCase& data, std::uint32_t page_size,
              bool without_queries = false)
      : backend_(backend), row_(data.kv_row()) {
    std::uint32_t blocks = 3;
    for (const Lengths& length : data.lengths()) blocks += static_cast<std::uint32_t>(div_ceil(length.kv, page_size)) + 1;
    cache = must(
        PagedKvCache::create(backend, KvLayout::uniform(2, shape.num_kv_heads, shape.head_dim, DType::bf16, page_size), blocks));
    std::vector<std::uint32_t> order;
    for (std::uint32_t i = 0; i < blocks; ++i) order.push_back(must(cache->alloc_block()));
    std::mt19937 random(blocks);
    std::ranges::shuffle(order, random);
    for (const std::uint32_t block : order) must(cache->drop_ref(block));
    k_.assign(std::size_t{blocks} * page_size * row_, 0xFFFF);
    v_ = k_;
    std::size_t at = 0;
    for (const Lengths& length : data.lengths()) {
      tables.emplace_back(*cache);
      must(tables.back().reserve(length.kv));
      for (std::uint32_t t = 0; t < length.kv; ++t, ++at) {
        if (without_queries && t >= length.kv - length.q) continue;
        std::copy_n(&data.k()[at * row_], row_, &k_[static_cast<std::size_t>(tables.back().slot(t)) * row_]);
        std::copy_n(&data.v()[at * row_], row_, &v_[static_cast<std::size_t>(tables.back().slot(t)) * row_]);
      }
      sequences.push_back({.pages = tables.back().blocks(), .kv_tokens = length.kv, .q_tokens = length.q});
    }
    upload();
  }
  void upload() {
    must(backend_.copy_h2d(cache->k_pool(1), std::as_bytes(std::span(k_))));
    must(backend_.copy_h2d(cache->v_pool(1), std::as_bytes(std::span(v_))));
  }
  /// Pages of a table that no query of `shape` sees become NaN, and their indices nonsense in `sequences`.
  void forget_before_window(const flashinfer::AttentionShape& shape) {
    const std::uint32_t page_size = cache->block_size();
    spoiled_.reserve(sequences.size());
    for (flashinfer::Sequence& sequence : sequences) {
      const std::int64_t first_seen = std::int64_t{sequence.kv_tokens} - sequence.q_tokens + 1 - shape.window;
      std::vector<std::int32_t> pages(sequence.pages.begin(), sequence.pages.end());
      for (std::int64_t page = 0; page < first_seen / page_size; ++page) {
        const std::size_t begin = static_cast<std::size_t>(pages[page]) * page_size * row_;
        std::fill_n(&k_[begin], std::size_t{page_size} * row_, 0xFFFF);
        std::fill_n(&v_[begin], std::size_t{page_size} * row_, 0xFFFF);
        pages[page] = -5;
      }
      spoiled_.push_back(std::move(pages));
      sequence.pages = spoiled_.back();
    }
    upload();
  }
  flashinfer::KvPages pages() const { return must(flashinfer::kv_pages(*cache, 1)); }
  /// What the pools were filled with.
  const std::vector<std::uint16_t>& k() const { return k_; }
  const std::vector<std::uint16_t>& v() const { return v_; }

  std::unique_ptr<PagedKvCache> cache;
  std::vector<BlockTable> tables;
  std::vector<flashinfer::Sequence> sequences;

 private:
  GpuBackend& backend_;
  std::uint32_t row_;
  std::vector<std::uint16_t> k_, v_;
  std::vector<std::vector<std::int32_t>> spoiled_;
};

}  // namespace metrale::test
