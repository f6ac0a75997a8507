// SPDX-License-Identifier: Apache-2.0
//
// Communicators of one process: what every communicator has to do, and what happens when ranks disagree, leave or do not come.
#include "metrale/bridges/in_process.h"

#include "bridges/collective/reduce.h"
#include "metrale/backends/host.h"
#include "metrale/backends/mock.h"
#include "support/communicator_suite.h"

namespace metrale::test {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<GpuBackend> small_host() {
  host::Options options;
  options.num_threads = 1;
  return good(host::create(options));
}

CommunicatorWorld world_of(std::uint32_t size, bool mock = false, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  CommunicatorWorld world;
  std::vector<GpuBackend*> backends;
  for (std::uint32_t rank = 0; rank < size; ++rank) {
    world.backends.push_back(mock ? good(mock::create()) : small_host());
    backends.push_back(world.backends.back().get());
  }
  world.ranks = good(in_process::create(backends, {.timeout = timeout}));
  return world;
}

CommunicatorCase host_case(std::uint32_t size) {
  return {fmt::format("Host{}", size), size, [size](std::string&) { return world_of(size); }};
}
CommunicatorCase mock_case(std::uint32_t size) {
  return {fmt::format("Mock{}", size), size, [size](std::string&) { return world_of(size, true); }};
}

INSTANTIATE_TEST_SUITE_P(InProcess, CommunicatorSuite,
                         ::testing::Values(host_case(1), host_case(2), host_case(3), host_case(8), mock_case(2)),
                         communicator_case_name);

/// What each rank's wait answers after `body` enqueued on its stream; a rank without body makes no call.
std::vector<std::string> answers(CommunicatorWorld& world, const std::function<void(Communicator&, DevicePtr)>& body) {
  std::vector<std::string> texts(world.ranks.size());
  on_each_rank(world, [&](Communicator& comm) {
    RankMemory memory(comm.backend(), 1024);
    body(comm, memory.ptr());
    const Result<> waited = comm.synchronize(comm.backend().default_stream());
    texts[comm.rank()] = waited ? "ok" : waited.error().to_string();
  });
  return texts;
}

StreamHandle stream_of(Communicator& comm) { return comm.backend().default_stream(); }

TEST(InProcess, RanksThatDisagreeAllFailWithBothCalls) {
  const std::vector<std::function<void(Communicator&, DevicePtr)>> disagreements = {
      [](Communicator& comm, DevicePtr p) {
        static_cast<void>(comm.all_reduce(p, p, 4 + comm.rank(), DType::f32, stream_of(comm)));
      },
      [](Communicator& comm, DevicePtr p) {
        good(comm.all_reduce(p, p, 4, comm.rank() == 0 ? DType::f32 : DType::i32, stream_of(comm)));
      },
      [](Communicator& comm, DevicePtr p) {
        good(comm.all_reduce(p, p, 4, DType::f32, stream_of(comm), comm.rank() == 0 ? ReduceOp::sum : ReduceOp::max));
      },
      [](Communicator& comm, DevicePtr p) { good(comm.broadcast(p, p, 4, DType::f32, comm.rank(), stream_of(comm))); },
      [](Communicator& comm, DevicePtr p) {
        if (comm.rank() == 0) return good(comm.all_reduce(p, p, 4, DType::f32, stream_of(comm)));
        good(comm.broadcast(p, p, 4, DType::f32, 0, stream_of(comm)));
      },
      [](Communicator& comm, DevicePtr p) {
        CollectiveGroup group(comm, stream_of(comm));
        for (std::uint32_t i = 0; i <= comm.rank(); ++i) group.add({.from = p.offset(64 * i), .to = p.offset(64 * i), .count = 4});
        good(group.end());
      },
      [](Communicator& comm, DevicePtr p) {
        if (comm.rank() == 0) return good(comm.send(p, 4, DType::f32, 1, stream_of(comm)));
        good(comm.receive(p, 5, DType::f32, 0, stream_of(comm)));
      }};
  for (std::size_t i = 0; i < disagreements.size(); ++i) {
    CommunicatorWorld world = world_of(2);
    const auto texts = answers(world, disagreements[i]);
    // A sender has gone on; it learns of it by asking.
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      const Result<> health = world.ranks[rank]->health();
      ASSERT_FALSE(health) << "disagreement " << i << ", rank " << rank << ": " << texts[rank];
      EXPECT_EQ(health.error().code(), Errc::invalid_argument);
      EXPECT_THAT(health.error().to_string(), HasSubstr("rank 1 makes ")) << i;
    }
  }
}

TEST(InProcess, AfterAFaultOutputsAreNotNumbersAndCallsAnswerTheFirstReason) {
  CommunicatorWorld world = world_of(2);
  on_each_rank(world, [&](Communicator& comm) {
    RankMemory memory(comm.backend(), 64);
    memory.put(std::vector<float>(16, 1.0F));
    good(comm.all_reduce(memory.ptr(), memory.ptr(), 8 + comm.rank(), DType::f32, stream_of(comm)));
    EXPECT_FALSE(comm.synchronize(stream_of(comm)));
    EXPECT_TRUE(std::isnan(memory.get<float>()[0])) << "rank " << comm.rank();
    const Result<> later = comm.all_reduce(memory.ptr(), memory.ptr(), 8, DType::f32, stream_of(comm));
    ASSERT_FALSE(later);
    EXPECT_THAT(later.error().to_string(), HasSubstr("all_reduce of 9 f32"));
  });
}

TEST(InProcess, ARankThatLeavesEndsTheWaitOfTheOthers) {
  CommunicatorWorld world = world_of(3);
  on_each_rank(world, [&](Communicator& comm) {
    RankMemory memory(comm.backend(), 64);
    if (comm.rank() == 1) return world.ranks[1].reset();
    // One of the others may be so late that its call answers already.
    static_cast<void>(comm.all_reduce(memory.ptr(), memory.ptr(), 8, DType::f32, stream_of(comm)));
    const Result<> waited = comm.synchronize(stream_of(comm));
    ASSERT_FALSE(waited);
    EXPECT_THAT(waited.error().to_string(), HasSubstr("rank 1, which has left"));
  });
}

TEST(InProcess, ARankThatDoesNotComeIsATimeoutForEveryRank) {
  CommunicatorWorld world = world_of(2, false, std::chrono::milliseconds(50));
  const auto texts = answers(world, [&](Communicator& comm, DevicePtr p) {
    if (comm.rank() == 0) good(comm.all_reduce(p, p, 8, DType::f32, stream_of(comm)));
  });
  EXPECT_THAT(texts[0], HasSubstr("timeout: all_reduce of 8 f32, sum: rank 0 waited 50 ms"));
  ASSERT_FALSE(world.ranks[1]->health());
  EXPECT_EQ(world.ranks[1]->health().error().code(), Errc::timeout);
}

TEST(InProcess, AbortEndsTheWaitOfTheOthers) {
  CommunicatorWorld world = world_of(2);
  const auto texts = answers(world, [&](Communicator& comm, DevicePtr p) {
    if (comm.rank() == 0) return static_cast<void>(comm.all_reduce(p, p, 8, DType::f32, stream_of(comm)));
    comm.abort("out of patience");
    comm.abort("a second reason");
  });
  for (const std::string& text : texts) EXPECT_THAT(text, HasSubstr("aborted on rank 1: out of patience"));
}

// The last to come found the calls of a rank that had given up and was gone.
TEST(InProcess, RanksThatGiveUpWhileOthersComeLeaveNothingBehind) {
  for (int round = 0; round < 40; ++round) {
    CommunicatorWorld world = world_of(4, false, std::chrono::milliseconds(2));
    on_each_rank(world, [&](Communicator& comm) {
      RankMemory memory(comm.backend(), 4096);
      std::this_thread::sleep_for(std::chrono::microseconds(700 * comm.rank()));
      for (int i = 0; i < 4; ++i) static_cast<void>(comm.all_reduce(memory.ptr(), memory.ptr(), 1024, DType::f32, stream_of(comm)));
      static_cast<void>(comm.synchronize(stream_of(comm)));
    });
  }
}

TEST(InProcess, ACallInACaptureNeedsPreparation) {
  CommunicatorWorld world = world_of(1);
  Communicator& comm = *world.ranks[0];
  RankMemory memory(comm.backend(), 1 << 16);
  Stream stream = good(Stream::create(comm.backend()));
  {
    CaptureScope capture = good(CaptureScope::begin(comm.backend(), stream.handle()));
    const Result<> refused = comm.all_reduce(memory.ptr(), memory.ptr(), 1 << 14, DType::f32, stream.handle());
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), Errc::capture_unsafe);
    EXPECT_THAT(refused.error().to_string(), HasSubstr("call prepare with as many before"));
    good(good(capture.end()).release());
  }
  good(comm.prepare(stream.handle(), 2 << 16));
  CaptureScope capture = good(CaptureScope::begin(comm.backend(), stream.handle()));
  good(comm.all_reduce(memory.ptr(), memory.ptr(), 1 << 14, DType::f32, stream.handle()));
  good(good(capture.end()).release());
}

TEST(InProcess, StagingThatAGraphNamesStaysUntilTheGraphGoes) {
  CommunicatorWorld world = world_of(1);
  Communicator& comm = *world.ranks[0];
  RankMemory memory(comm.backend(), 1 << 16);
  Stream stream = good(Stream::create(comm.backend()));
  good(comm.prepare(stream.handle(), 128));
  CaptureScope capture = good(CaptureScope::begin(comm.backend(), stream.handle()));
  good(comm.all_reduce(memory.ptr(), memory.ptr(), 16, DType::f32, stream.handle()));
  Graph graph = good(capture.end());
  good(comm.prepare(stream.handle(), 1 << 17));  // outgrows what the graph names
  memory.put(std::vector<float>(16, 2.0F));
  good(graph.launch(stream.handle()));
  good(comm.synchronize(stream.handle()));
  EXPECT_EQ(memory.get<float>()[0], 2.0F);
  const Result<> early = comm.trim();
  ASSERT_FALSE(early);
  EXPECT_EQ(early.error().code(), Errc::in_use);
  good(graph.release());
  good(comm.trim());
}

TEST(InProcess, WorldsThatCannotBeAreRefused) {
  const auto one = small_host();
  const auto code = [](const auto& result) { return result ? Errc{} : result.error().code(); };
  GpuBackend* const twice[] = {one.get(), one.get()};
  GpuBackend* const none[] = {one.get(), nullptr};
  EXPECT_EQ(code(in_process::create({})), Errc::invalid_argument);
  EXPECT_EQ(code(in_process::create(twice)), Errc::invalid_argument);
  EXPECT_EQ(code(in_process::create(none)), Errc::invalid_argument);
  EXPECT_EQ(code(in_process::create({twice, 1}, {.timeout = std::chrono::milliseconds(0)})), Errc::invalid_argument);
  EXPECT_EQ(code(in_process::create(std::vector<GpuBackend*>(in_process::kMaxRanks + 1, one.get()))), Errc::invalid_argument);
  mock::Options options;
  options.without = {Capability::pinned_memory};
  const auto poor = good(mock::create(options));
  GpuBackend* const lacking[] = {poor.get()};
  EXPECT_EQ(code(in_process::create(lacking)), Errc::unsupported);
}

// ---- the checks, without any rank ----

TEST(CollectiveCheck, RefusesWhatCannotBe) {
  const DevicePtr a{0x10000}, b{0x20000};
  const auto code = [](const Collective& call, std::uint32_t rank = 0, std::uint32_t size = 2) {
    const Result<> checked = check(call, rank, size);
    return checked ? Errc{} : checked.error().code();
  };
  using enum CollectiveKind;
  const Collective fine{all_reduce, a, b, 16, DType::f32};
  EXPECT_EQ(code(fine), Errc{});
  EXPECT_EQ(code(fine, 2, 2), Errc::invalid_argument);
  EXPECT_EQ(code(fine, 0, 0), Errc::invalid_argument);
  EXPECT_EQ(code({all_reduce, a, {}, 16, DType::f32}), Errc::invalid_argument);
  EXPECT_EQ(code({all_reduce, a, a.offset(4), 16, DType::f32}), Errc::invalid_argument);
  EXPECT_EQ(code({all_reduce, a, a, 16, DType::i16}), Errc::unsupported);
  EXPECT_EQ(code({all_reduce, a, a, 16, DType::f8_e4m3}), Errc::unsupported);
  EXPECT_EQ(code({static_cast<CollectiveKind>(9), a, a, 16, DType::f32}), Errc::invalid_argument);
  EXPECT_EQ(code({all_reduce, a, a, 16, static_cast<DType>(99)}), Errc::invalid_argument);
  EXPECT_EQ(code({all_reduce, a, a, 16, DType::f32, static_cast<ReduceOp>(9)}), Errc::invalid_argument);
  EXPECT_EQ(code({all_gather, a, b, std::uint64_t{1} << 60, DType::f64}), Errc::out_of_range);
  EXPECT_EQ(code({all_gather, a, a, 16, DType::f32}, 0), Errc{});
  EXPECT_EQ(code({all_gather, a, a, 16, DType::f32}, 1), Errc::invalid_argument);
  EXPECT_EQ(code({all_gather, a.offset(64), a, 16, DType::f32}, 1), Errc{});
  EXPECT_EQ(code({reduce_scatter, a, a.offset(64), 16, DType::f32}, 1), Errc{});
  EXPECT_EQ(code({reduce_scatter, a, a.offset(64), 16, DType::f32}, 0), Errc::invalid_argument);
  EXPECT_EQ(code({broadcast, {}, b, 16, DType::f32, ReduceOp::sum, 1}, 0), Errc{});
  EXPECT_EQ(code({broadcast, {}, b, 16, DType::f32, ReduceOp::sum, 0}, 0), Errc::invalid_argument);
  EXPECT_EQ(code({broadcast, a, b, 16, DType::f32, ReduceOp::sum, 2}), Errc::invalid_argument);
  EXPECT_EQ(code({send, a, {}, 16, DType::i16, ReduceOp::sum, 1}), Errc{});
  EXPECT_EQ(code({send, a, {}, 16, DType::f32, ReduceOp::sum, 0}), Errc::invalid_argument);
  EXPECT_EQ(code({receive, {}, b, 16, DType::f32, ReduceOp::sum, 1}, 1), Errc::invalid_argument);
  EXPECT_EQ(code({receive, {}, DevicePtr{~std::uint64_t{0} - 7}, 16, DType::f64, ReduceOp::sum, 1}), Errc::out_of_range);
}

TEST(Reduce, HalfFloatsRoundToNearest) {
  // Every half survives the way through a sum with zero; what lies between two goes to the nearer, ties to even.
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const std::uint16_t zero = (half & 0x8000U) ? 0x8000 : 0;
    const std::byte* const from[] = {reinterpret_cast<const std::byte*>(&half), reinterpret_cast<const std::byte*>(&zero)};
    std::uint16_t to = 0;
    in_process::reduce(ReduceOp::sum, DType::f16, from, reinterpret_cast<std::byte*>(&to), 1);
    const bool is_nan = (half & 0x7c00U) == 0x7c00U && (half & 0x3ffU) != 0;
    if (is_nan) {
      ASSERT_GT(to & 0x7fffU, 0x7c00U) << bits;
    } else {
      ASSERT_EQ(to, half) << bits;
    }
  }
  const auto sum = [](std::uint16_t a, std::uint16_t b) {
    const std::byte* const from[] = {reinterpret_cast<const std::byte*>(&a), reinterpret_cast<const std::byte*>(&b)};
    std::uint16_t to = 0;
    in_process::reduce(ReduceOp::sum, DType::f16, from, reinterpret_cast<std::byte*>(&to), 1);
    return to;
  };
  EXPECT_EQ(sum(0x3c00, 0x1000), 0x3c00);  // 1 + 2^-11: a tie, to the even 1
  EXPECT_EQ(sum(0x3c01, 0x1000), 0x3c02);  // the next one up: to even
  EXPECT_EQ(sum(0x3c00, 0x1001), 0x3c01);  // just above the tie
  EXPECT_EQ(sum(0x7bff, 0x4c00), 0x7c00);  // 65504 + 16: infinity
  EXPECT_EQ(sum(0x0001, 0x0001), 0x0002);  // subnormal
}

TEST(Reduce, WholeNumbersWrapAround) {
  const auto product = [](std::int32_t a, std::int32_t b) {
    const std::byte* const from[] = {reinterpret_cast<const std::byte*>(&a), reinterpret_cast<const std::byte*>(&b)};
    std::int32_t to = 0;
    in_process::reduce(ReduceOp::product, DType::i32, from, reinterpret_cast<std::byte*>(&to), 1);
    return to;
  };
  EXPECT_EQ(product(-3, 5), -15);
  EXPECT_EQ(product(1 << 20, 1 << 12), 0);
}

}  // namespace
}  // namespace metrale::test
