// SPDX-License-Identifier: Apache-2.0
//
// Which streams joined a capture, and whether they were joined back: the driver looks at work only, so a stream that joined and did
// nothing would pass it. Empty while no capture is open. Any thread.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

namespace metrale::cuda {

class Joins {
 public:
  /// `event` marks `stream` inside the capture `id`; 0: outside any.
  void recorded(CUevent event, CUstream stream, std::uint64_t id) {
    std::lock_guard lock(mutex_);
    std::erase_if(marks_, [&](const Mark& mark) { return mark.event == event; });
    if (id != 0) marks_.push_back({event, stream, id});
  }
  /// `stream` waits for `event`, and takes part in the capture `id` from now on, or did before.
  void waited(CUevent event, CUstream stream, std::uint64_t id, bool is_new) {
    std::lock_guard lock(mutex_);
    if (is_new) members_.push_back({stream, id, false});
    const auto mark = std::find_if(marks_.begin(), marks_.end(), [&](const Mark& m) { return m.event == event && m.id == id; });
    if (mark == marks_.end() || mark->stream == stream) return;
    for (Member& member : members_) {
      if (member.stream == mark->stream && member.id == id) member.is_joined_back = true;
    }
  }
  /// Forgets a capture; how many of its streams were not joined back.
  std::size_t end(std::uint64_t id) {
    std::lock_guard lock(mutex_);
    const auto open = std::count_if(members_.begin(), members_.end(),
                                    [&](const Member& member) { return member.id == id && !member.is_joined_back; });
    std::erase_if(members_, [&](const Member& member) { return member.id == id; });
    std::erase_if(marks_, [&](const Mark& mark) { return mark.id == id; });
    return static_cast<std::size_t>(open);
  }

 private:
  struct Mark {
    CUevent event;
    CUstream stream;
    std::uint64_t id;
  };
  struct Member {
    CUstream stream;
    std::uint64_t id;
    bool is_joined_back;
  };
  std::mutex mutex_;
  std::vector<Mark> marks_;
  std::vector<Member> members_;
};

}  // namespace metrale::cuda
