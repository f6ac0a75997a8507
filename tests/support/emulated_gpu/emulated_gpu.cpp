// SPDX-License-Identifier: Apache-2.0
#include "support/emulated_gpu/emulated_gpu.h"

#include <sys/mman.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

/// Saves the running fiber in `*save` and goes on with `load`.
extern "C" void metrale_emulated_switch(void** save, void* load);
__asm__(R"(
.globl metrale_emulated_switch
metrale_emulated_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

namespace metrale::test::emulated {
namespace {

constexpr std::size_t kStackBytes = 16384;
/// Rounds of all warps without progress before a run counts as stuck. In a round each warp may be left out by chance.
constexpr int kMostIdleRounds = 60;

struct Fiber {
  std::uint32_t block = 0;
  std::uint32_t thread = 0;
  void* stack = nullptr;
  bool done = false;
};

struct Run {
  Grid grid;
  std::vector<Block> blocks;
  std::vector<Warp> warps;
  std::vector<Bar> clusters;
  std::vector<Fiber> fibers;
  const std::function<void()>* kernel = nullptr;
  Fiber* running = nullptr;
  void* scheduler = nullptr;
  bool progressed = false;
  std::string failure;
};
Run* run_ = nullptr;

void enter() {
  (*run_->kernel)();
  run_->running->done = true;
  for (;;) yield(true);
}

/// Memory of which only what is touched is taken.
class Stacks {
 public:
  explicit Stacks(std::size_t count) : bytes_(count * kStackBytes) {
    base_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base_ == MAP_FAILED) throw std::runtime_error("no memory for the stacks of the emulated threads");
  }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  ~Stacks() { ::munmap(base_, bytes_); }
  /// A stack as `metrale_emulated_switch` left it: six registers, and `enter` to return to.
  void* make(std::size_t index) const {
    auto* top = reinterpret_cast<std::uintptr_t*>(static_cast<char*>(base_) + (index + 1) * kStackBytes);
    *--top = 0;
    *--top = reinterpret_cast<std::uintptr_t>(&enter);
    return top - 6;
  }

 private:
  std::size_t bytes_;
  void* base_;
};

/// Lets the lanes of a warp run as long as one of them gets on.
bool run_warp(Run& run, std::uint32_t index) {
  bool any = false;
  for (bool again = true; again && run.failure.empty();) {
    run.progressed = false;
    const std::uint32_t turn = run.warps[index].turn;
    for (std::uint32_t lane = 0; lane < 32 && run.failure.empty(); ++lane) {
      Fiber& fiber = run.fibers[32 * index + lane];
      if (fiber.done) continue;
      run.running = &fiber;
      metrale_emulated_switch(&run.scheduler, fiber.stack);
    }
    again = run.progressed || run.warps[index].turn != turn;
    any = any || again;
    if (std::all_of(&run.fibers[32 * index], &run.fibers[32 * index] + 32, [](const Fiber& f) { return f.done; })) break;
  }
  return any;
}

}  // namespace

std::string run(const Grid& grid, std::mt19937& random, const std::function<void()>& kernel) {
  Run run;
  run.grid = grid;
  run.kernel = &kernel;
  run_ = &run;
  run.blocks.resize(grid.blocks);
  for (Block& block : run.blocks) {
    block.memory.assign(grid.shared_bytes + 128, static_cast<char>(0xff));  // NaN, whatever it is read as
    block.shared = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(block.memory.data()) + 127) / 128 * 128);
  }
  const std::uint32_t warps = grid.blocks * (grid.threads / 32);
  run.warps.resize(warps);
  run.clusters.resize(grid.blocks / grid.cluster_blocks);
  const Stacks stacks(std::size_t{grid.blocks} * grid.threads);
  for (std::uint32_t block = 0; block < grid.blocks; ++block) {
    for (std::uint32_t thread = 0; thread < grid.threads; ++thread)
      run.fibers.push_back({.block = block, .thread = thread, .stack = stacks.make(run.fibers.size())});
  }
  std::vector<std::uint32_t> order(warps);
  std::iota(order.begin(), order.end(), 0);
  for (int idle = 0; idle < kMostIdleRounds && run.failure.empty(); ++idle) {
    std::ranges::shuffle(order, random);
    std::erase_if(order, [&](std::uint32_t w) {
      return std::all_of(&run.fibers[32 * w], &run.fibers[32 * w] + 32, [](const Fiber& f) { return f.done; });
    });
    if (order.empty()) break;
    for (const std::uint32_t w : order) {
      if (random() % 8 != 0 && run_warp(run, w)) idle = 0;
    }
  }
  if (run.failure.empty() && !order.empty()) run.failure = "no thread can go on, and some have not ended";
  run_ = nullptr;
  return std::move(run.failure);
}

std::uint32_t thread_index() { return run_->running->thread; }
std::uint32_t block_index() { return run_->running->block; }
Warp& warp() { return run_->warps[block_index() * (run_->grid.threads / 32) + thread_index() / 32]; }
Block& block() { return run_->blocks[block_index()]; }

void yield(bool progressed) {
  run_->progressed = run_->progressed || progressed;
  metrale_emulated_switch(&run_->running->stack, run_->scheduler);
}

void fail(std::string text) {
  if (run_->failure.empty()) {
    run_->failure =
        std::move(text) + " (block " + std::to_string(block_index()) + ", thread " + std::to_string(thread_index()) + ")";
  }
  for (;;) yield(false);
}

namespace {
void arrive(Bar& bar, std::uint32_t threads, bool waits) {
  if (bar.count == 0) bar.threads = threads;
  if (bar.threads != threads) fail("threads give different counts for one barrier");
  const std::uint32_t turn = bar.turn;
  if (++bar.count == threads) {
    bar.count = 0;
    ++bar.turn;
    yield(true);
  } else {
    while (waits && bar.turn == turn) yield(false);
  }
}
}  // namespace

void cluster_barrier() {
  arrive(run_->clusters[block_index() / run_->grid.cluster_blocks], run_->grid.cluster_blocks * run_->grid.threads, true);
}
void block_barrier(std::uint32_t id, std::uint32_t threads, bool waits) { arrive(block().bars[id], threads, waits); }

std::uint32_t shared_address(const void* p) {
  const auto offset = static_cast<const char*>(p) - block().shared;
  if (offset < 0 || offset >= run_->grid.shared_bytes) fail("an address outside shared memory");
  return static_cast<std::uint32_t>(offset);
}
Block& block_of(std::uint32_t address) {
  const std::uint32_t rank = address >> 24;
  return rank == 0 ? block() : run_->blocks[block_index() / run_->grid.cluster_blocks * run_->grid.cluster_blocks + rank - 1];
}
char* shared_at(std::uint32_t address, std::uint32_t bytes) {
  const std::uint32_t offset = address & 0xffffff;
  if (offset + bytes > run_->grid.shared_bytes) fail("an access outside shared memory");
  if (offset % std::min(bytes, 16U) != 0) fail("an unaligned access of shared memory");
  return block_of(address).shared + offset;
}
ByteBarrier& byte_barrier_at(std::uint32_t address) {
  const auto found = block_of(address).byte_barriers.find(address & 0xffffff);
  if (found == block_of(address).byte_barriers.end()) fail("a barrier that was not initialised");
  return found->second;
}

}  // namespace metrale::test::emulated
