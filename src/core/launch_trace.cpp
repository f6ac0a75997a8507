// SPDX-License-Identifier: Apache-2.0
#include "metrale/launch_trace.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include <fmt/format.h>

namespace metrale {
namespace {

/// Operations that a graph would record.
bool is_traced(Op op) noexcept {
  switch (op) {
    case Op::launch:
    case Op::launch_raw:
    case Op::copy_d2d:
    case Op::copy_d2d_async:
    case Op::copy_d2d_2d_async:
    case Op::copy_h2d_async:
    case Op::copy_h2d_async_retained:
    case Op::copy_d2h_async:
    case Op::memset:
    case Op::memset_async: return true;
    default: return false;
  }
}

std::vector<std::uint64_t> words_of(const KernelArg& arg) {
  std::vector<std::uint64_t> words(std::max<std::size_t>((arg.size_bytes() + 7) / 8, 1));
  if (arg.size_bytes() != 0) std::memcpy(words.data(), arg.data(), arg.size_bytes());
  return words;
}

std::string text(Dim3 d) { return fmt::format("({}, {}, {})", d.x, d.y, d.z); }

}  // namespace

void LaunchTrace::begin() {
  steps_.clear();
  args_.clear();
  lost_record_ = false;
  owner_.store(std::this_thread::get_id(), std::memory_order_release);
}

Result<std::vector<LaunchTrace::Difference>> LaunchTrace::end_and_diff() {
  if (owner_.load(std::memory_order_acquire) != std::this_thread::get_id())
    return Error(Errc::invalid_argument, "no traced region is open on this thread; begin one first");
  owner_.store({}, std::memory_order_release);
  try {
    if (lost_record_) throw std::bad_alloc();
    std::vector<Difference> differences;
    if (before_) {
      const std::vector<Step>& before = *before_;
      for (std::size_t i = 0; i < std::max(before.size(), steps_.size()); ++i) {
        if (i >= steps_.size()) {
          differences.push_back({i, name_of(before[i]), "came before and does not now"});
        } else if (i >= before.size()) {
          differences.push_back({i, name_of(steps_[i]), "is new"});
        } else if (std::string how = difference(before[i], steps_[i]); !how.empty()) {
          differences.push_back({i, name_of(steps_[i]), std::move(how)});
        }
      }
    }
    before_ = std::move(steps_);
    steps_ = {};
    return differences;
  } catch (const std::bad_alloc&) {
    return Error(Errc::out_of_memory, "the host has no memory left for the traced region; trace a shorter one");
  }
}

std::string LaunchTrace::name_of(const Step& step) const {
  return step.kernel ? backend_.kernel_name(step.kernel) : std::string(to_string(step.op));
}

std::string LaunchTrace::difference(const Step& before, const Step& now) const {
  if (before.op != now.op || before.kernel != now.kernel) return fmt::format("was {}", name_of(before));
  if (before.grid != now.grid) return fmt::format("grid {} became {}", text(before.grid), text(now.grid));
  if (before.block != now.block) return fmt::format("block {} became {}", text(before.block), text(now.block));
  if (before.shared_bytes != now.shared_bytes)
    return fmt::format("{} bytes of shared memory became {}", before.shared_bytes, now.shared_bytes);
  if (before.words.size() != now.words.size()) return fmt::format("{} arguments became {}", before.words.size(), now.words.size());
  std::string how;
  for (std::size_t i = 0; i < now.words.size(); ++i) {
    if (before.words[i].size() != now.words[i].size()) {
      how += fmt::format("{}argument {} changed its size", how.empty() ? "" : ", ", i);
      continue;
    }
    for (std::size_t w = 0; w < now.words[i].size(); ++w) {
      if (before.words[i][w] == now.words[i][w]) continue;
      how += fmt::format("{}argument {}, word {}: {:#x} became {:#x}", how.empty() ? "" : ", ", i, w, before.words[i][w],
                         now.words[i][w]);
    }
  }
  return how;
}

void LaunchTrace::on_launch_args(const OpRecord&, std::span<const KernelArg> args) noexcept {
  if (owner_.load(std::memory_order_relaxed) != std::this_thread::get_id()) return;
  try {
    args_.clear();
    for (const KernelArg& arg : args) args_.push_back(words_of(arg));
  } catch (const std::bad_alloc&) {
    lost_record_ = true;
  }
}

void LaunchTrace::on_op(const OpRecord& record) noexcept {
  if (owner_.load(std::memory_order_relaxed) != std::this_thread::get_id()) return;
  if (record.outcome != 0 || !is_traced(record.op)) return;
  try {
    Step step{record.op, record.kernel, record.grid, record.block, record.shared_bytes, {}};
    if (record.op == Op::launch) {
      step.words = std::exchange(args_, {});
    } else if (record.op != Op::launch_raw) {
      step.words = {{record.dst}, {record.src}, {record.bytes}};
    }
    steps_.push_back(std::move(step));
  } catch (const std::bad_alloc&) {
    lost_record_ = true;
  }
}

}  // namespace metrale
