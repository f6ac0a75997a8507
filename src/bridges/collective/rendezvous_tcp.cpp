// SPDX-License-Identifier: Apache-2.0
//
// Meeting at an address. Each rank connects to rank 0 and says who it is; when all have come, each gets the bytes, or what is
// wrong. Numbers go as this machine has them: all run the same program on the same kind of machine.
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "bridges/collective/rendezvous_parts.h"

namespace metrale::detail {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kMagic = 0x6d65'7472'616c'6502;  // "metrale", form 2
constexpr auto kPause = std::chrono::milliseconds(20);
/// How long a stranger may keep rank 0 waiting for its first words.
constexpr auto kHelloTime = std::chrono::milliseconds(500);

struct Hello {
  std::uint64_t magic = kMagic;
  std::uint32_t rank = 0;
  std::uint32_t size = 0;
};
struct Answer {
  std::uint64_t magic = kMagic;
  std::uint32_t refused = 0;    ///< 1: what follows is the reason.
  std::uint32_t num_bytes = 0;  ///< kMaxSharedBytes at most.
};

std::string words(int code) { return std::generic_category().message(code); }

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) noexcept : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// Waits until the socket can be read or written. False at the deadline.
bool wait_for(const Socket& socket, short events, Deadline deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd entry{.fd = socket.get(), .events = events, .revents = 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(std::min<long long>(left, 1000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return true;  // the call that follows has the words
  }
}

/// Sends or receives all of `bytes`. 0, or the system's code; ETIMEDOUT at the deadline, ECONNRESET at the end of the stream.
template <bool kSend, class Byte>
int transfer(const Socket& socket, std::span<Byte> bytes, Deadline deadline) {
  while (!bytes.empty()) {
    if (!wait_for(socket, kSend ? POLLOUT : POLLIN, deadline)) return ETIMEDOUT;
    ssize_t moved = 0;
    if constexpr (kSend) {
      moved = ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    } else {
      moved = ::recv(socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    }
    if (moved < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) continue;
    if (moved < 0) return errno;
    if (moved == 0) return ECONNRESET;
    bytes = bytes.subspan(static_cast<std::size_t>(moved));
  }
  return 0;
}
template <class T>
int send_one(const Socket& socket, const T& value, Deadline deadline) {
  return transfer<true>(socket, std::as_bytes(std::span<const T>(&value, 1)), deadline);
}
template <class T>
int receive_one(const Socket& socket, T& value, Deadline deadline) {
  return transfer<false>(socket, std::as_writable_bytes(std::span<T>(&value, 1)), deadline);
}

struct FreeAddresses {
  void operator()(addrinfo* list) const noexcept { ::freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

Result<Addresses> resolve(const std::string& name, std::uint16_t port, bool to_listen) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (to_listen ? AI_PASSIVE : 0);
  addrinfo* list = nullptr;
  if (const int code = ::getaddrinfo(name.c_str(), fmt::format("{}", port).c_str(), &hints, &list); code != 0)
    return Error(Errc::io, fmt::format("no address of '{}' to meet at: {}", name, ::gai_strerror(code)));
  return Addresses(list);
}

Result<Socket> listen_at(const std::string& name, std::uint16_t port) {
  const Addresses list = METRALE_TRY(resolve(name, port, true));
  int code = EADDRNOTAVAIL;
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    Socket socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
    const int on = 1;
    if (socket) static_cast<void>(::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)));
    if (socket && ::bind(socket.get(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(socket.get(), 128) == 0) return socket;
    code = errno;
  }
  return Error(Errc::io,
               fmt::format("rank 0 cannot listen at {}:{}: {}; set METRALE_RENDEZVOUS to an address of rank 0's machine and "
                           "a free port",
                           name, port, words(code)));
}

void answer(const Socket& guest, bool refused, std::span<const std::byte> bytes, Deadline deadline) {
  const Answer head{.magic = kMagic, .refused = refused ? 1U : 0U, .num_bytes = static_cast<std::uint32_t>(bytes.size())};
  if (send_one(guest, head, deadline) == 0) static_cast<void>(transfer<true>(guest, bytes, deadline));
}

Result<std::vector<std::byte>> host(const ProcessPlace& place, const std::string& name, std::uint16_t port,
                                    std::span<const std::byte> mine, Deadline deadline) {
  const Socket door = METRALE_TRY(listen_at(name, port));
  std::vector<Socket> guests(place.size);
  std::vector<bool> has_come(place.size, false);
  has_come[0] = true;
  // Tells everybody who has come.
  const auto refuse = [&](Errc code, std::string why, const Socket* last) -> Error {
    why.resize(std::min(why.size(), kMaxSharedBytes));
    const auto soon = Clock::now() + kHelloTime;
    if (last != nullptr) answer(*last, true, std::as_bytes(std::span(why)), soon);
    for (const Socket& guest : guests) {
      if (guest) answer(guest, true, std::as_bytes(std::span(why)), soon);
    }
    return Error(code, std::move(why));
  };
  while (std::ranges::find(has_come, false) != has_come.end()) {
    if (!wait_for(door, POLLIN, deadline)) {
      return refuse(Errc::timeout,
                    fmt::format("{} of {} did not come to {}:{} in time", missing_ranks(has_come), place.size, name, port),
                    nullptr);
    }
    Socket guest(::accept4(door.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!guest) continue;
    Hello hello;
    if (receive_one(guest, hello, std::min(deadline, Clock::now() + kHelloTime)) != 0 || hello.magic != kMagic)
      continue;  // a stranger
    if (hello.size != place.size) {
      return refuse(Errc::invalid_argument,
                    fmt::format("rank {} is one of {} processes, and rank 0 one of {}", hello.rank, hello.size, place.size),
                    &guest);
    }
    if (hello.rank == 0 || hello.rank >= place.size || has_come[hello.rank])
      return refuse(Errc::invalid_argument, fmt::format("two processes say that they are rank {} of {}", hello.rank, place.size),
                    &guest);
    guests[hello.rank] = std::move(guest);
    has_come[hello.rank] = true;
  }
  for (std::uint32_t rank = 1; rank < place.size; ++rank) answer(guests[rank], false, mine, deadline);
  // Each closes when it has the bytes: the door stays open till then.
  std::vector<bool> has_taken(place.size, false);
  has_taken[0] = true;
  for (std::uint32_t rank = 1; rank < place.size; ++rank) {
    std::byte thanks{};
    has_taken[rank] = receive_one(guests[rank], thanks, deadline) == 0;
  }
  if (std::ranges::find(has_taken, false) == has_taken.end()) return std::vector<std::byte>(mine.begin(), mine.end());
  return Error(Errc::io, fmt::format("{} of {} came to {}:{} and left without what rank 0 shares", missing_ranks(has_taken),
                                     place.size, name, port));
}

/// A connection that has said hello.
Result<Socket> knock(const ProcessPlace& place, const std::string& name, std::uint16_t port, Deadline deadline) {
  std::string last = "nothing answers";
  do {
    Result<Addresses> list = resolve(name, port, false);
    if (!list) {
      last = list.error().message();
    } else {
      for (const addrinfo* a = list->get(); a != nullptr; a = a->ai_next) {
        Socket socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
        if (!socket) continue;
        int code = ::connect(socket.get(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
        if (code == EINPROGRESS) {
          socklen_t size = sizeof(code);
          if (!wait_for(socket, POLLOUT, std::min(deadline, Clock::now() + std::chrono::seconds(2)))) {
            code = ETIMEDOUT;
          } else if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &code, &size) != 0) {
            code = errno;
          }
        }
        const Hello hello{.magic = kMagic, .rank = place.rank, .size = place.size};
        if (code == 0) code = send_one(socket, hello, deadline);
        if (code == 0) return socket;
        last = words(code);
      }
    }
    std::this_thread::sleep_for(kPause);
  } while (Clock::now() < deadline);
  return Error(Errc::timeout, fmt::format("rank {} did not reach rank 0 at {}:{} in time: {}", place.rank, name, port, last));
}

Result<std::vector<std::byte>> guest(const ProcessPlace& place, const std::string& name, std::uint16_t port, Deadline deadline) {
  while (true) {
    const Socket socket = METRALE_TRY(knock(place, name, port, deadline));
    Answer head;
    const int code = receive_one(socket, head, deadline);
    if (code == ETIMEDOUT) {
      return Error(Errc::timeout,
                   fmt::format("rank {} came to {}:{}, and not all of {} ranks did in time", place.rank, name, port, place.size));
    }
    // Rank 0 of an earlier start that just went, or a stranger's server: knock again.
    if (code != 0 || head.magic != kMagic || head.num_bytes > kMaxSharedBytes) {
      if (Clock::now() >= deadline)
        return Error(Errc::timeout, fmt::format("what answers at {}:{} is not rank 0 of this start", name, port));
      std::this_thread::sleep_for(kPause);
      continue;
    }
    std::vector<std::byte> bytes(head.num_bytes);
    if (const int broken = transfer<false>(socket, std::span(bytes), deadline); broken != 0)
      return Error(Errc::io,
                   fmt::format("rank {} got no whole answer from rank 0 at {}:{}: {}", place.rank, name, port, words(broken)));
    if (head.refused != 0)
      return Error(Errc::invalid_argument, std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
    static_cast<void>(send_one(socket, std::byte{1}, deadline));
    return bytes;
  }
}

}  // namespace

Result<std::vector<std::byte>> share_by_tcp(const ProcessPlace& place, const std::string& host_name, std::uint16_t port,
                                            std::span<const std::byte> mine, Deadline deadline) {
  return place.rank == 0 ? host(place, host_name, port, mine, deadline) : guest(place, host_name, port, deadline);
}

}  // namespace metrale::detail
