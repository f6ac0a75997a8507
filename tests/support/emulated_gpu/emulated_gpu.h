// SPDX-License-Identifier: Apache-2.0
//
// Device code run by the host, thread by thread: every thread of a grid is a fiber that yields where it waits. Warps take turns in
// a random order, and lanes meet where the hardware makes them meet. It shows whether a kernel computes what it should whatever the
// order in which its warps run, and whether it ends; it knows nothing of weak memory or of time. One grid at a time, one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace metrale::test::emulated {

struct Grid {
  std::uint32_t blocks = 1;
  std::uint32_t threads = 32;  ///< A multiple of 32.
  std::uint32_t cluster_blocks = 1;
  std::uint32_t shared_bytes = 0;
};

/// Runs `kernel` for each thread. Returns what went wrong, nothing otherwise: a rule broken, or no thread able to go on.
std::string run(const Grid& grid, std::mt19937& random, const std::function<void()>& kernel);

// ---- for the instructions, on the running thread ----
struct Bar {
  std::uint32_t threads = 0;
  std::uint32_t count = 0;
  std::uint32_t turn = 0;
};
/// A barrier in shared memory that counts arrivals and bytes.
struct ByteBarrier {
  std::int64_t arrivals = 0;
  std::int64_t pending = 0;
  std::int64_t bytes = 0;
  std::uint32_t phase = 0;
  void turn() {
    if (pending != 0 || bytes != 0) return;
    phase ^= 1;
    pending = arrivals;
  }
};
struct Block {
  std::vector<char> memory;
  char* shared = nullptr;
  std::map<std::uint32_t, ByteBarrier> byte_barriers;  ///< By address.
  Bar bars[16];
};
struct Warp {
  const char* what = nullptr;  ///< What the lanes that wait have met for.
  std::uint32_t count = 0;
  std::uint32_t turn = 0;
  const void* in[32] = {};
  void* out[32] = {};
};

std::uint32_t thread_index();
std::uint32_t block_index();
Warp& warp();
Block& block();
/// Lets others run. `progressed`: something was done that others may wait for.
void yield(bool progressed);
/// Ends the run.
[[noreturn]] void fail(std::string text);
/// Waits for all threads of the cluster.
void cluster_barrier();
void block_barrier(std::uint32_t id, std::uint32_t threads, bool waits);

// Addresses of shared memory: a byte of the running block, or with 1 + rank in the upper eight bits of a block of its cluster.
std::uint32_t shared_address(const void* p);
Block& block_of(std::uint32_t address);
char* shared_at(std::uint32_t address, std::uint32_t bytes);
ByteBarrier& byte_barrier_at(std::uint32_t address);

/// All lanes of the warp meet; the last calls `act` with what each gave and wants.
template <class Act>
void meet(const char* what, const void* in, void* out, Act&& act) {
  Warp& w = warp();
  if (w.count == 0) w.what = what;
  if (w.what != what) fail(std::string("lanes of a warp meet in ") + w.what + " and " + what);
  const std::uint32_t lane = thread_index() % 32;
  const std::uint32_t turn = w.turn;
  w.in[lane] = in;
  w.out[lane] = out;
  if (++w.count == 32) {
    act(w);
    w.count = 0;
    ++w.turn;
  } else {
    while (w.turn == turn) yield(false);
  }
}

}  // namespace metrale::test::emulated
