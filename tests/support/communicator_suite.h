// SPDX-License-Identifier: Apache-2.0
//
// What every communicator has to do, whatever is behind it: a suite over worlds of ranks, each a thread with a backend of its own.
// A program instantiates it with the worlds that it can make.
#pragma once

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "metrale/bridges/communicator.h"
#include "metrale/dequantise.h"
#include "metrale/graph.h"
#include "metrale/stream.h"

namespace metrale::test {

/// The ranks of a world, backends first, so that they go last.
struct CommunicatorWorld {
  std::vector<std::unique_ptr<GpuBackend>> backends;
  std::vector<std::unique_ptr<Communicator>> ranks;
};

struct CommunicatorCase {
  std::string name;
  std::uint32_t size = 1;
  /// Makes the world. Called by one thread; null with the reason where there is none on this machine.
  std::function<CommunicatorWorld(std::string& why_not)> make;
};
inline void PrintTo(const CommunicatorCase& c, std::ostream* out) { *out << c.name; }

template <class T>
T good(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().to_string());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

/// Runs `body` for each rank in a thread of its own. A throw fails the test and aborts the world, so that nobody waits for long.
inline void on_each_rank(CommunicatorWorld& world, const std::function<void(Communicator&)>& body) {
  std::vector<std::thread> threads;
  for (const auto& rank : world.ranks) {
    threads.emplace_back([&body, &rank] {
      try {
        body(*rank);
      } catch (const std::exception& thrown) {
        ADD_FAILURE() << "rank " << rank->rank() << ": " << thrown.what();
        rank->abort("its test failed");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// Values of a rank, alike whoever asks.
template <class T>
std::vector<T> rank_values(std::uint32_t rank, std::size_t count, std::uint32_t seed = 1) {
  std::mt19937 random(seed * 7919 + rank);
  std::vector<T> values(count);
  for (T& value : values) {
    if constexpr (std::is_floating_point_v<T>) {
      value = std::normal_distribution<T>()(random);
    } else {
      value = static_cast<T>(random() % 13 + 1);
    }
  }
  return values;
}

/// Memory of a rank with its contents; gives it back.
class RankMemory {
 public:
  RankMemory(GpuBackend& backend, std::uint64_t bytes) : backend_(backend), bytes_(bytes), ptr_(good(backend.alloc(bytes))) {
    poison();
  }
  ~RankMemory() { EXPECT_TRUE(backend_.free(ptr_)); }
  RankMemory(const RankMemory&) = delete;
  RankMemory& operator=(const RankMemory&) = delete;

  DevicePtr ptr() const { return ptr_; }
  /// NaN in every float type.
  void poison() { good(backend_.memset(ptr_, 0xff, bytes_)); }
  template <class T>
  void put(const std::vector<T>& values, std::uint64_t at = 0) {
    good(backend_.copy_h2d(ptr_.offset(at), std::as_bytes(std::span(values))));
  }
  template <class T>
  std::vector<T> get() const {
    std::vector<T> values(bytes_ / sizeof(T));
    good(backend_.copy_d2h(std::as_writable_bytes(std::span(values)), ptr_));
    return values;
  }

 private:
  GpuBackend& backend_;
  std::uint64_t bytes_;
  DevicePtr ptr_;
};

/// By relative L2 and by the ratio of the norms, so that zeros and halves fail by name.
template <class T>
void expect_near(const std::vector<T>& got, const std::vector<double>& want, double tolerance, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  double difference = 0, norm = 0, got_norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - want[i], 2);
    norm += std::pow(want[i], 2);
    got_norm += std::pow(static_cast<double>(got[i]), 2);
  }
  EXPECT_LE(std::sqrt(difference / norm), tolerance) << what;
  EXPECT_NEAR(std::sqrt(got_norm / norm), 1.0, tolerance + 1e-12) << what;
}

/// What `op` makes of all ranks' values from `first` on.
template <class T>
std::vector<double> reduced(ReduceOp op, std::uint32_t size, std::size_t total, std::size_t first, std::size_t count,
                            std::uint32_t seed = 1) {
  std::vector<double> want(count);
  for (std::uint32_t rank = 0; rank < size; ++rank) {
    const std::vector<T> values = rank_values<T>(rank, total, seed);
    for (std::size_t i = 0; i < count; ++i) {
      const auto value = static_cast<double>(values[first + i]);
      double& sum = want[i];
      switch (op) {
        case ReduceOp::product: sum = rank == 0 ? value : sum * value; break;
        case ReduceOp::min: sum = rank == 0 ? value : std::min(sum, value); break;
        case ReduceOp::max: sum = rank == 0 ? value : std::max(sum, value); break;
        default: sum += value;
      }
    }
  }
  if (op == ReduceOp::average) {
    for (double& value : want) value /= size;
  }
  return want;
}

class CommunicatorSuite : public ::testing::TestWithParam<CommunicatorCase> {
 protected:
  void SetUp() override {
    std::string why_not;
    world = GetParam().make(why_not);
    if (world.ranks.empty()) GTEST_SKIP() << why_not;
    ASSERT_EQ(world.ranks.size(), GetParam().size);
  }
  void TearDown() override {
    for (const auto& rank : world.ranks) {
      if (const Result<> health = rank->health(); !health) ADD_FAILURE() << health.error().to_string();
    }
    world.ranks.clear();
    for (const auto& backend : world.backends) EXPECT_TRUE(backend->live_allocations().empty()) << backend->alloc_report();
  }

  std::uint32_t size() const { return GetParam().size; }

  CommunicatorWorld world;
};

TEST_P(CommunicatorSuite, RanksAreNumberedInOrder) {
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    EXPECT_EQ(world.ranks[rank]->rank(), rank);
    EXPECT_EQ(world.ranks[rank]->size(), size());
    EXPECT_FALSE(world.ranks[rank]->name().empty());
  }
}

TEST_P(CommunicatorSuite, AllReduceAddsUpFloats) {
  on_each_rank(world, [&](Communicator& comm) {
    const StreamHandle stream = comm.backend().default_stream();
    for (const std::size_t count : {1, 3, 1000, 65537}) {
      RankMemory from(comm.backend(), count * 4), to(comm.backend(), count * 4);
      from.put(rank_values<float>(comm.rank(), count));
      good(comm.all_reduce(from.ptr(), to.ptr(), count, DType::f32, stream));
      good(comm.synchronize(stream));
      expect_near(to.get<float>(), reduced<float>(ReduceOp::sum, size(), count, 0, count), 1e-6, fmt::format("{} floats", count));
      EXPECT_EQ(from.get<float>(), rank_values<float>(comm.rank(), count)) << "the source changed";
      good(comm.all_reduce(from.ptr(), from.ptr(), count, DType::f32, stream));
      good(comm.synchronize(stream));
      EXPECT_EQ(from.get<float>(), to.get<float>()) << "in place";
    }
  });
}

TEST_P(CommunicatorSuite, AllReduceTakesEachOperationAndType) {
  on_each_rank(world, [&](Communicator& comm) {
    const StreamHandle stream = comm.backend().default_stream();
    constexpr std::size_t kCount = 777;
    const auto try_type = [&]<class T>(DType type, T) {
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
        // Bytes would wrap.
        if (sizeof(T) == 1 && op == ReduceOp::product) continue;
        RankMemory from(comm.backend(), kCount * sizeof(T)), to(comm.backend(), kCount * sizeof(T));
        from.put(rank_values<T>(comm.rank(), kCount));
        good(comm.all_reduce(from.ptr(), to.ptr(), kCount, type, stream, op));
        good(comm.synchronize(stream));
        expect_near(to.get<T>(), reduced<T>(op, size(), kCount, 0, kCount), std::is_same_v<T, float> ? 1e-5 : 1e-12,
                    fmt::format("{} {}", to_string(type), to_string(op)));
      }
    };
    try_type(DType::f32, float{});
    try_type(DType::f64, double{});
    try_type(DType::i8, std::int8_t{});
    try_type(DType::u8, std::uint8_t{});
    try_type(DType::i32, std::int32_t{});
    try_type(DType::u32, std::uint32_t{});
    try_type(DType::i64, std::int64_t{});
    try_type(DType::u64, std::uint64_t{});
    RankMemory from(comm.backend(), kCount * 4), to(comm.backend(), kCount * 4);
    from.put(rank_values<float>(comm.rank(), kCount));
    good(comm.all_reduce(from.ptr(), to.ptr(), kCount, DType::f32, stream, ReduceOp::average));
    good(comm.synchronize(stream));
    expect_near(to.get<float>(), reduced<float>(ReduceOp::average, size(), kCount, 0, kCount), 1e-6, "average");
  });
}

TEST_P(CommunicatorSuite, AllReduceAddsUpBrainFloats) {
  on_each_rank(world, [&](Communicator& comm) {
    const StreamHandle stream = comm.backend().default_stream();
    constexpr std::size_t kCount = 4099;
    std::vector<double> want(kCount);
    for (std::uint32_t rank = 0; rank < size(); ++rank) {
      const std::vector<float> values = rank_values<float>(rank, kCount);
      for (std::size_t i = 0; i < kCount; ++i) want[i] += bf16_to_f32(f32_to_bf16(values[i]));
    }
    std::vector<std::uint16_t> mine;
    for (const float value : rank_values<float>(comm.rank(), kCount)) mine.push_back(f32_to_bf16(value));
    RankMemory from(comm.backend(), kCount * 2), to(comm.backend(), kCount * 2);
    from.put(mine);
    good(comm.all_reduce(from.ptr(), to.ptr(), kCount, DType::bf16, stream));
    good(comm.synchronize(stream));
    std::vector<float> got;
    for (const std::uint16_t bits : to.get<std::uint16_t>()) got.push_back(bf16_to_f32(bits));
    expect_near(got, want, 1.0 / 128, "bf16");
  });
}

TEST_P(CommunicatorSuite, AllGatherPutsEachRanksPartInItsPlace) {
  on_each_rank(world, [&](Communicator& comm) {
    const StreamHandle stream = comm.backend().default_stream();
    constexpr std::size_t kCount = 333;
    std::vector<float> want;
    for (std::uint32_t rank = 0; rank < size(); ++rank) {
      const auto part = rank_values<float>(rank, kCount);
      want.insert(want.end(), part.begin(), part.end());
    }
    RankMemory from(comm.backend(), kCount * 4), to(comm.backend(), kCount * 4 * size());
    from.put(rank_values<float>(comm.rank(), kCount));
    good(comm.all_gather(from.ptr(), to.ptr(), kCount, DType::f32, stream));
    good(comm.synchronize(stream));
    EXPECT_EQ(to.get<float>(), want);
    to.poison();
    to.put(rank_values<float>(comm.rank(), kCount), comm.rank() * kCount * 4);
    good(comm.all_gather(to.ptr().offset(comm.rank() * kCount * 4), to.ptr(), kCount, DType::f32, stream));
    good(comm.synchronize(stream));
    EXPECT_EQ(to.get<float>(), want) << "in place";
  });
}

TEST_P(CommunicatorSuite, ReduceScatterGivesEachRankItsPart) {
  on_each_rank(world, [&](Communicator& comm) {
    const StreamHandle stream = comm.backend().default_stream();
    constexpr std::size_t kCount = 501;
    const std::size_t total = kCount * size();
    RankMemory from(comm.backend(), total * 4), to(comm.backend(), kCount * 4);
    from.put(rank_values<float>(comm.rank(), total));
    good(comm.reduce_scatter(from.ptr(), to.ptr(), kCount, DType::f32, stream));
    good(comm.synchronize(stream));
    expect_near(to.get<float>(), reduced<float>(ReduceOp::sum, size(), total, comm.rank() * kCount, kCount), 1e-6,
                "reduce_scatter");
    good(comm.reduce_scatter(from.ptr(), from.ptr().offset(comm.rank() * kCount * 4), kCount, DType::f32, stream));
    good(comm.synchronize(stream));
    const auto all = from.get<float>();
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(comm.rank() * kCount);
    EXPECT_EQ(std::vector<float>(begin, begin + kCount), to.get<float>()) << "in place";
  });
}

TEST_P(CommunicatorSuite, BroadcastGivesEveryRankTheRootsMemory) {
  on_each_rank(world, [&](Communicator& comm) {
    const StreamHandle stream = comm.backend().default_stream();
    constexpr std::size_t kCount = 1025;
    for (std::uint32_t root = 0; root < size(); ++root) {
      RankMemory from(comm.backend(), kCount * 2), to(comm.backend(), kCount * 2);
      from.put(rank_values<std::int16_t>(comm.rank(), kCount));
      good(comm.broadcast(comm.rank() == root ? from.ptr() : DevicePtr{}, to.ptr(), kCount, DType::i16, root, stream));
      good(comm.synchronize(stream));
      EXPECT_EQ(to.get<std::int16_t>(), rank_values<std::int16_t>(root, kCount)) << "root " << root;
      good(comm.broadcast(from.ptr(), from.ptr(), kCount, DType::i16, root, stream));
      good(comm.synchronize(stream));
      EXPECT_EQ(from.get<std::int16_t>(), rank_values<std::int16_t>(root, kCount)) << "in place, root " << root;
    }
  });
}

TEST_P(CommunicatorSuite, SendsAndReceivesOfAGroupMakeARing) {
  if (size() == 1) GTEST_SKIP() << "a rank sends nothing to itself";
  on_each_rank(world, [&](Communicator& comm) {
    const StreamHandle stream = comm.backend().default_stream();
    constexpr std::size_t kCount = 2049;
    const std::uint32_t next = (comm.rank() + 1) % size(), last = (comm.rank() + size() - 1) % size();
    RankMemory from(comm.backend(), kCount * 4), to(comm.backend(), kCount * 4);
    for (std::uint32_t round = 1; round <= 3; ++round) {
      from.put(rank_values<float>(comm.rank(), kCount, round));
      CollectiveGroup group(comm, stream);
      group.receive(to.ptr(), kCount, DType::f32, last).send(from.ptr(), kCount, DType::f32, next);
      good(group.end());
      good(comm.synchronize(stream));
      EXPECT_EQ(to.get<float>(), rank_values<float>(last, kCount, round)) << "round " << round;
    }
  });
}

TEST_P(CommunicatorSuite, OnePairAlone) {
  if (size() == 1) GTEST_SKIP() << "a rank sends nothing to itself";
  on_each_rank(world, [&](Communicator& comm) {
    const StreamHandle stream = comm.backend().default_stream();
    constexpr std::size_t kCount = 100;
    RankMemory memory(comm.backend(), kCount * 8);
    if (comm.rank() == size() - 1) {
      memory.put(rank_values<double>(comm.rank(), kCount));
      good(comm.send(memory.ptr(), kCount, DType::f64, 0, stream));
    } else if (comm.rank() == 0) {
      good(comm.receive(memory.ptr(), kCount, DType::f64, size() - 1, stream));
    }
    good(comm.synchronize(stream));
    if (comm.rank() == 0) {
      EXPECT_EQ(memory.get<double>(), rank_values<double>(size() - 1, kCount));
    }
  });
}

TEST_P(CommunicatorSuite, CallsOfAGroupDoNotMix) {
  on_each_rank(world, [&](Communicator& comm) {
    const StreamHandle stream = comm.backend().default_stream();
    constexpr std::size_t kCount = 640;
    RankMemory a(comm.backend(), kCount * 4), b(comm.backend(), kCount * 4), gathered(comm.backend(), kCount * 4 * size());
    a.put(rank_values<float>(comm.rank(), kCount, 5));
    b.put(rank_values<float>(comm.rank(), kCount, 6));
    RankMemory part(comm.backend(), kCount * 4);
    part.put(rank_values<float>(comm.rank(), kCount, 7));
    CollectiveGroup group(comm, stream);
    group.add({.from = a.ptr(), .to = a.ptr(), .count = kCount})
        .add({.from = b.ptr(), .to = b.ptr(), .count = kCount, .op = ReduceOp::max})
        .add({.kind = CollectiveKind::all_gather, .from = part.ptr(), .to = gathered.ptr(), .count = kCount});
    good(group.end());
    good(comm.synchronize(stream));
    expect_near(a.get<float>(), reduced<float>(ReduceOp::sum, size(), kCount, 0, kCount, 5), 1e-6, "first");
    expect_near(b.get<float>(), reduced<float>(ReduceOp::max, size(), kCount, 0, kCount, 6), 0, "second");
    const auto all = gathered.get<float>();
    const auto last = rank_values<float>(size() - 1, kCount, 7);
    EXPECT_TRUE(std::equal(last.begin(), last.end(), all.end() - kCount)) << "third";
  });
}

TEST_P(CommunicatorSuite, AGraphOfCallsReplays) {
  on_each_rank(world, [&](Communicator& comm) {
    Stream stream = good(Stream::create(comm.backend()));
    constexpr std::size_t kCount = 3000;
    RankMemory from(comm.backend(), kCount * 4), to(comm.backend(), kCount * 4);
    from.put(rank_values<float>(comm.rank(), kCount, 1));
    good(comm.prepare(stream.handle(), 2 * kCount * 4));
    {
      CaptureScope capture = good(CaptureScope::begin(comm.backend(), stream.handle()));
      good(comm.all_reduce(from.ptr(), to.ptr(), kCount, DType::f32, stream.handle()));
      good(comm.all_reduce(to.ptr(), to.ptr(), kCount, DType::f32, stream.handle()));
      Graph graph = good(capture.end());
      EXPECT_TRUE(std::isnan(to.get<float>()[0])) << "captured work ran";
      for (std::uint32_t round = 1; round <= 4; ++round) {
        from.put(rank_values<float>(comm.rank(), kCount, round));
        to.poison();
        good(graph.launch(stream.handle()));
        good(comm.synchronize(stream.handle()));
        std::vector<double> want = reduced<float>(ReduceOp::sum, size(), kCount, 0, kCount, round);
        for (double& value : want) value *= size();
        expect_near(to.get<float>(), want, 1e-6, fmt::format("replay {}", round));
      }
    }
    // A memory that a graph names could not be freed: nothing of it is left.
    good(comm.trim());
  });
}

TEST_P(CommunicatorSuite, TwoStreamsAtOnce) {
  on_each_rank(world, [&](Communicator& comm) {
    constexpr std::size_t kCount = 20000;
    constexpr int kRounds = 20;
    Stream streams[] = {good(Stream::create(comm.backend())), good(Stream::create(comm.backend()))};
    RankMemory a(comm.backend(), kCount * 4), b(comm.backend(), kCount * 4);
    RankMemory* memory[] = {&a, &b};
    for (std::uint32_t i = 0; i < 2; ++i) memory[i]->put(rank_values<float>(comm.rank(), kCount, 10 + i));
    for (int round = 0; round < kRounds; ++round) {
      for (std::uint32_t i = 0; i < 2; ++i)
        good(comm.all_reduce(memory[i]->ptr(), memory[i]->ptr(), kCount, DType::f32, streams[i].handle(), ReduceOp::average));
    }
    for (std::uint32_t i = 0; i < 2; ++i) good(comm.synchronize(streams[i].handle()));
    for (std::uint32_t i = 0; i < 2; ++i) {
      expect_near(memory[i]->get<float>(), reduced<float>(ReduceOp::average, size(), kCount, 0, kCount, 10 + i), 1e-5,
                  fmt::format("stream {}", i));
    }
    good(comm.trim());
  });
}

TEST_P(CommunicatorSuite, CallsFollowTheWorkOfTheirStream) {
  on_each_rank(world, [&](Communicator& comm) {
    Stream stream = good(Stream::create(comm.backend()));
    constexpr std::size_t kCount = 1 << 16;
    RankMemory source(comm.backend(), kCount * 4), from(comm.backend(), kCount * 4), to(comm.backend(), kCount * 4);
    source.put(rank_values<float>(comm.rank(), kCount));
    RankMemory result(comm.backend(), kCount * 4);
    for (int round = 0; round < 8; ++round) {
      good(comm.backend().memset_async(from.ptr(), 0xff, kCount * 4, stream.handle()));
      good(comm.backend().copy_d2d_async(from.ptr(), source.ptr(), kCount * 4, stream.handle()));
      good(comm.all_reduce(from.ptr(), to.ptr(), kCount, DType::f32, stream.handle()));
      good(comm.backend().copy_d2d_async(result.ptr(), to.ptr(), kCount * 4, stream.handle()));
      good(comm.backend().memset_async(to.ptr(), 0xff, kCount * 4, stream.handle()));
    }
    good(comm.synchronize(stream.handle()));
    expect_near(result.get<float>(), reduced<float>(ReduceOp::sum, size(), kCount, 0, kCount), 1e-6, "between copies");
    good(comm.trim());
  });
}

TEST_P(CommunicatorSuite, WhatIsWrongIsRefusedAndTheRestGoesOn) {
  on_each_rank(world, [&](Communicator& comm) {
    const StreamHandle stream = comm.backend().default_stream();
    RankMemory memory(comm.backend(), 4096);
    const auto code = [](const Result<>& result) { return result ? Errc{} : result.error().code(); };
    const DevicePtr ptr = memory.ptr();
    EXPECT_EQ(code(comm.all_reduce(ptr, ptr, 0, DType::f32, stream)), Errc::invalid_argument);
    EXPECT_EQ(code(comm.all_reduce({}, ptr, 4, DType::f32, stream)), Errc::invalid_argument);
    EXPECT_EQ(code(comm.all_reduce(ptr.offset(2), ptr.offset(2), 4, DType::f32, stream)), Errc::invalid_argument);
    EXPECT_EQ(code(comm.all_reduce(ptr, ptr, 1025, DType::f32, stream)), Errc::out_of_range);
    EXPECT_EQ(code(comm.all_reduce(ptr, ptr, ~std::uint64_t{0} / 2, DType::f32, stream)), Errc::out_of_range);
    EXPECT_EQ(code(comm.all_reduce(ptr, ptr, 4, DType::q4_0, stream)), Errc::unsupported);
    EXPECT_EQ(code(comm.all_reduce(ptr, ptr, 4, DType::f32, StreamHandle{77})), Errc::invalid_argument);
    EXPECT_EQ(code(comm.send(ptr, 4, DType::f32, size(), stream)), Errc::invalid_argument);
    EXPECT_EQ(code(comm.enqueue_group({}, stream)), Errc::invalid_argument);
    good(comm.all_reduce(ptr, ptr, 4, DType::u8, stream));
    good(comm.synchronize(stream));
  });
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CommunicatorSuite);

inline std::string communicator_case_name(const ::testing::TestParamInfo<CommunicatorCase>& info) { return info.param.name; }

}  // namespace metrale::test
