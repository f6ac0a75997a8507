// SPDX-License-Identifier: Apache-2.0
//
// Processes that find each other, here threads: by TCP and by file, with ranks that are late, missing, doubled or of another start.
#include "metrale/bridges/rendezvous.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>

namespace metrale::test {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

std::vector<std::byte> payload() {
  std::vector<std::byte> bytes(128);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 + 1);
  return bytes;
}

/// A port that was free a moment ago.
std::uint16_t free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  socklen_t size = sizeof(address);
  EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  ::close(fd);
  return ::ntohs(address.sin_port);
}

class Meeting : public ::testing::TestWithParam<const char*> {
 protected:
  Meeting() : folder(std::filesystem::temp_directory_path() / fmt::format("metrale-meeting-{}-{}", ::getpid(), counter++)) {
    std::filesystem::create_directories(folder);
    meeting = std::string_view(GetParam()) == "file" ? "file://" + (folder / "id").string()
                                                     : fmt::format("tcp://127.0.0.1:{}", free_port());
  }
  ~Meeting() override { std::filesystem::remove_all(folder); }

  ProcessPlace place(std::uint32_t rank, std::uint32_t size) const { return {rank, size, rank, meeting, "test"}; }
  Result<std::vector<std::byte>> share(std::uint32_t rank, std::uint32_t size, milliseconds timeout = milliseconds(20'000)) const {
    return share_bytes(place(rank, size), rank == 0 ? payload() : std::vector<std::byte>(), timeout);
  }
  /// Each of these (rank, size, milliseconds of delay) in a thread.
  struct Comer {
    std::uint32_t rank;
    std::uint32_t size;
    int delay;
  };
  std::vector<Result<std::vector<std::byte>>> meet(std::vector<Comer> comers, milliseconds timeout = milliseconds(20'000)) {
    std::vector<Result<std::vector<std::byte>>> got(comers.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < comers.size(); ++i) {
      threads.emplace_back([&, i] {
        std::this_thread::sleep_for(milliseconds(comers[i].delay));
        got[i] = share(comers[i].rank, comers[i].size, timeout);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return got;
  }
  void expect_nothing_left() const { EXPECT_TRUE(std::filesystem::is_empty(folder)); }

  static inline int counter = 0;
  const std::filesystem::path folder;
  std::string meeting;
};

TEST_P(Meeting, EveryRankGetsTheBytesInWhateverOrderTheyCome) {
  for (const bool host_first : {true, false}) {
    const auto got = meet({{0, 4, host_first ? 0 : 60}, {1, 4, host_first ? 60 : 0}, {2, 4, 20}, {3, 4, 0}});
    for (std::size_t rank = 0; rank < got.size(); ++rank) {
      ASSERT_TRUE(got[rank]) << "rank " << rank << ": " << got[rank].error().to_string();
      EXPECT_EQ(*got[rank], payload()) << "rank " << rank;
    }
    expect_nothing_left();
  }
}

TEST_P(Meeting, OneRankAloneGoesNowhere) {
  const auto got = share_bytes({0, 1, 0, "", "test"}, payload(), milliseconds(1));
  ASSERT_TRUE(got);
  EXPECT_EQ(*got, payload());
}

TEST_P(Meeting, ARankThatDoesNotComeIsNamed) {
  const auto got = meet({{0, 4, 0}, {2, 4, 0}}, milliseconds(300));
  for (const auto& result : got) ASSERT_FALSE(result);
  EXPECT_EQ(got[0].error().code(), Errc::timeout);
  EXPECT_THAT(got[0].error().to_string(), HasSubstr("ranks 1, 3 of 4 did not come"));
  expect_nothing_left();
}

TEST_P(Meeting, WithoutRankZeroItIsATimeout) {
  const auto got = share(1, 2, milliseconds(150));
  ASSERT_FALSE(got);
  EXPECT_EQ(got.error().code(), Errc::timeout);
  EXPECT_THAT(got.error().to_string(), HasSubstr("rank 0"));
  expect_nothing_left();
}

INSTANTIATE_TEST_SUITE_P(Ways, Meeting, ::testing::Values("tcp", "file"), [](const auto& way) { return std::string(way.param); });

using MeetingByTcp = Meeting;
INSTANTIATE_TEST_SUITE_P(Tcp, MeetingByTcp, ::testing::Values("tcp"));

TEST_P(MeetingByTcp, RanksThatContradictEachOtherAllLearnWhy) {
  const auto doubled = meet({{0, 3, 0}, {1, 3, 20}, {1, 3, 40}}, milliseconds(5000));
  for (const auto& result : doubled) {
    ASSERT_FALSE(result);
    EXPECT_THAT(result.error().to_string(), HasSubstr("two processes say that they are rank 1 of 3"));
  }
  const auto sizes = meet({{0, 2, 0}, {1, 3, 20}}, milliseconds(5000));
  for (const auto& result : sizes) {
    ASSERT_FALSE(result);
    EXPECT_THAT(result.error().to_string(), HasSubstr("rank 1 is one of 3 processes, and rank 0 one of 2"));
  }
}

TEST_P(MeetingByTcp, StrangersAtTheDoorDoNotHoldItUp) {
  const auto port = static_cast<std::uint16_t>(std::stoi(meeting.substr(meeting.rfind(':') + 1)));
  std::thread stranger([&] {
    std::this_thread::sleep_for(milliseconds(50));
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = ::htons(port);
    address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
    if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0)
      static_cast<void>(::send(fd, "GET / HTTP/1.0\r\n\r\n", 18, MSG_NOSIGNAL));
    std::this_thread::sleep_for(milliseconds(200));
    ::close(fd);
  });
  const auto got = meet({{0, 2, 0}, {1, 2, 150}});
  stranger.join();
  for (const auto& result : got) ASSERT_TRUE(result) << result.error().to_string();
}

TEST_P(MeetingByTcp, APortThatIsTakenIsAnErrorOfRankZero) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::listen(fd, 1), 0);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const auto got =
      share_bytes({0, 2, 0, fmt::format("tcp://127.0.0.1:{}", ::ntohs(address.sin_port)), "test"}, payload(), milliseconds(5000));
  ::close(fd);
  ASSERT_FALSE(got);
  EXPECT_EQ(got.error().code(), Errc::io);
  EXPECT_THAT(got.error().to_string(), HasSubstr("cannot listen"));
}

using MeetingByFile = Meeting;
INSTANTIATE_TEST_SUITE_P(File, MeetingByFile, ::testing::Values("file"));

TEST_P(MeetingByFile, WhatAnEarlierStartLeftIsNotTaken) {
  // A start whose rank 0 ended between writing and the last rank's answer, kept by hand: its file and a note.
  std::string stale;
  {
    std::vector<std::thread> threads;
    threads.emplace_back(
        [&] { static_cast<void>(share_bytes(place(0, 2), std::vector<std::byte>(64, std::byte{9}), milliseconds(3000))); });
    // A guest that writes its note and never takes it away.
    std::ofstream(folder / "id.rank1", std::ios::binary) << [] {
      std::string note(24, '\0');
      const std::uint64_t magic = 0x6d65'7472'616c'6501, word = 77;
      const std::uint32_t size = 2, rank = 1;
      std::memcpy(note.data(), &magic, 8);
      std::memcpy(note.data() + 8, &word, 8);
      std::memcpy(note.data() + 16, &size, 4);
      std::memcpy(note.data() + 20, &rank, 4);
      return note;
    }();
    for (int i = 0; i < 400 && stale.empty(); ++i) {
      std::this_thread::sleep_for(milliseconds(5));
      std::ifstream file(folder / "id", std::ios::binary);
      stale.assign(std::istreambuf_iterator<char>(file), {});
    }
    for (std::thread& thread : threads) thread.join();
  }
  ASSERT_FALSE(stale.empty());
  std::ofstream(folder / "id", std::ios::binary) << stale;
  // Alone, a rank of the next start does not believe it.
  const auto alone = share(1, 2, milliseconds(200));
  ASSERT_FALSE(alone);
  EXPECT_THAT(alone.error().to_string(), HasSubstr("of another start"));
  // With rank 0 it gets the new bytes, although the old file and an old note were there first.
  std::ofstream(folder / "id", std::ios::binary) << stale;
  std::ofstream(folder / "id.rank1", std::ios::binary) << "rubbish";
  const auto got = meet({{0, 2, 0}, {1, 2, 50}});
  for (const auto& result : got) {
    ASSERT_TRUE(result) << result.error().to_string();
    EXPECT_EQ(*result, payload());
  }
}

TEST(ShareBytes, RefusesWhatCannotBe) {
  const auto code = [](const ProcessPlace& place, std::size_t bytes, int timeout = 50) {
    const auto got = share_bytes(place, std::vector<std::byte>(bytes), milliseconds(timeout));
    return got ? Errc{} : got.error().code();
  };
  EXPECT_EQ(code({2, 2, 0, "tcp://a:1", ""}, 8), Errc::invalid_argument);
  EXPECT_EQ(code({0, 0, 0, "tcp://a:1", ""}, 8), Errc::invalid_argument);
  EXPECT_EQ(code({0, kMaxProcesses + 1, 0, "tcp://a:1", ""}, 8), Errc::invalid_argument);
  EXPECT_EQ(code({0, 2, 0, "tcp://127.0.0.1:1", ""}, 0), Errc::invalid_argument);
  EXPECT_EQ(code({0, 2, 0, "tcp://127.0.0.1:1", ""}, kMaxSharedBytes + 1), Errc::invalid_argument);
  EXPECT_EQ(code({0, 2, 0, "tcp://127.0.0.1:9", ""}, 8, 0), Errc::invalid_argument);
  for (const char* meeting : {"", "tcp://", "tcp://host", "tcp://host:", "tcp://host:0", "tcp://host:65536", "tcp://:80",
                              "tcp://h:8x", "file://", "host:80"})
    EXPECT_EQ(code({0, 2, 0, meeting, ""}, 8), Errc::invalid_argument) << meeting;
  EXPECT_EQ(code({1, 2, 0, "file:///no/such/folder/id", ""}, 0), Errc::io);
}

// ---- the environment ----

Result<std::optional<ProcessPlace>> place_of(const std::map<std::string, std::string>& variables) {
  return process_place([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST(ProcessPlaceTest, ReadsWhatTorchrunAndMpiSet) {
  const auto alone = place_of({});
  ASSERT_TRUE(alone);
  EXPECT_FALSE(alone->has_value());
  const auto torch =
      place_of({{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}});
  ASSERT_TRUE(torch && *torch);
  EXPECT_EQ((*torch)->rank, 5U);
  EXPECT_EQ((*torch)->size, 8U);
  EXPECT_EQ((*torch)->local_rank, 1U);
  EXPECT_EQ((*torch)->meeting, "tcp://node0:29501");
  EXPECT_EQ((*torch)->source, "torchrun");
  const auto mpi =
      place_of({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"METRALE_RENDEZVOUS", "file:///shared/id"}});
  ASSERT_TRUE(mpi && *mpi);
  EXPECT_EQ((*mpi)->rank, 1U);
  EXPECT_EQ((*mpi)->local_rank, 1U);
  EXPECT_EQ((*mpi)->meeting, "file:///shared/id");
}

TEST(ProcessPlaceTest, WhatIsWrongIsNamed) {
  const auto refused = [](const std::map<std::string, std::string>& variables) {
    const auto place = place_of(variables);
    return place ? std::string("accepted") : place.error().to_string();
  };
  EXPECT_THAT(refused({{"RANK", "0"}}), HasSubstr("WORLD_SIZE is not set"));
  EXPECT_THAT(refused({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK is '2'"));
  EXPECT_THAT(refused({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK is '-1'"));
  EXPECT_THAT(refused({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), HasSubstr("WORLD_SIZE is 0"));
  EXPECT_THAT(refused({{"RANK", "0"}, {"WORLD_SIZE", "99999999999999999999"}}), HasSubstr("WORLD_SIZE is '9999"));
  EXPECT_THAT(refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}}), HasSubstr("MASTER_PORT is not set"));
  EXPECT_THAT(refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "65535"}}),
              HasSubstr("MASTER_PORT"));
}

}  // namespace
}  // namespace metrale::test
