// SPDX-License-Identifier: Apache-2.0
//
// Host functions on their way through a stream. The list owns each until it has run, so that those a lost device never runs are
// destroyed with it. Those of a graph belong to the graph. Any thread, the driver's own too.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace metrale::cuda {

struct HostCall {
  std::function<void()> fn;

  /// Runs the function; what it throws is logged and goes no further.
  void run() noexcept;
};

class HostCalls : public std::enable_shared_from_this<HostCalls> {
 public:
  /// What the driver is given for a function: pass it to `run_once`.
  struct Ticket {
    std::shared_ptr<HostCalls> list;  // shared: a driver thread may be the last to use it
    HostCall call;
  };

  Ticket* add(std::function<void()> fn);
  /// Takes it back: it was not enqueued.
  void drop(Ticket* ticket) noexcept;
  /// Destroys what never ran. Only where nothing can run any more.
  void clear() noexcept;

  /// For cuLaunchHostFunc: runs and destroys a ticket.
  static void run_once(void* ticket) noexcept;
  /// For cuLaunchHostFunc in a graph: runs a HostCall that the graph owns.
  static void run_again(void* call) noexcept;

 private:
  std::unique_ptr<Ticket> remove(Ticket* ticket) noexcept;

  std::mutex mutex_;
  std::unordered_map<Ticket*, std::unique_ptr<Ticket>> waiting_;
};

}  // namespace metrale::cuda
