// SPDX-License-Identifier: Apache-2.0
//
// What a fake GPU is made of. Everything here is guarded by `State::mutex` unless a line says otherwise; work runs outside it.
// Handles are numbers that are never used twice, so that a destroyed one is always found out.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "metrale/backends/host_kernel.h"
#include "support/fake_cuda/fake_gpu.h"

namespace metrale::fake_cuda {

using Clock = std::chrono::steady_clock;
struct Context;
struct Stream;
struct Graph;

// ---- work ----

/// The end of one piece of work.
struct Done {
  bool is_done = false;
  Clock::time_point at{};
};
using DonePtr = std::shared_ptr<Done>;

struct Work {
  std::function<CUresult()> run;  ///< Outside the lock; null: nothing but its place in the order.
  std::vector<DonePtr> after;
  DonePtr done = std::make_shared<Done>();
  bool is_host_function = false;
};

// ---- objects ----

template <class Handle, class T>
class Table {
 public:
  Handle add(std::shared_ptr<T> object) {
    const Handle handle = reinterpret_cast<Handle>(next_id());
    objects_.emplace(handle, std::move(object));
    return handle;
  }
  std::shared_ptr<T> find(Handle handle) const {
    const auto at = objects_.find(handle);
    return at == objects_.end() ? nullptr : at->second;
  }
  std::shared_ptr<T> remove(Handle handle) {
    const auto at = objects_.find(handle);
    if (at == objects_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(at->second);
    objects_.erase(at);
    return object;
  }
  std::size_t size() const { return objects_.size(); }
  /// Oldest first.
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (const auto& [handle, object] : objects_) visit(*object);
  }
  /// Takes out what `matches`.
  template <class Matches>
  std::vector<std::shared_ptr<T>> remove_if(Matches&& matches) {
    std::vector<std::shared_ptr<T>> removed;
    for (auto at = objects_.begin(); at != objects_.end();) {
      if (matches(*at->second)) {
        removed.push_back(std::move(at->second));
        at = objects_.erase(at);
      } else {
        ++at;
      }
    }
    return removed;
  }
  void clear() { objects_.clear(); }

 private:
  static std::uintptr_t next_id() {
    static std::atomic<std::uintptr_t> last{0x5000'0000'0000};
    return last += 64;
  }
  std::map<Handle, std::shared_ptr<T>> objects_;
};

struct Module;

struct Function {
  std::string name;
  std::string full_name;  ///< "module.function"
  host::KernelFn fn = nullptr;
  std::vector<std::uint32_t> param_bytes, param_offsets;
  int static_shared_bytes = 0;
  int max_threads = 1024;
  int max_dynamic_shared_bytes = 48 << 10;
  bool allows_wide_clusters = false;
  bool is_loaded = false;
  std::atomic<bool> is_unloaded{false};
  Context* context = nullptr;
  CUmodule module = nullptr;
};

struct Module {
  Context* context = nullptr;
  std::string name;
  std::vector<std::pair<CUfunction, std::shared_ptr<Function>>> functions;  ///< In the order of the image.
  std::map<std::string, CUdeviceptr, std::less<>> globals;
};

/// Calls the destructors of user objects on a thread of its own, because they run when nobody waits. Its own lock.
class Janitor {
 public:
  ~Janitor();
  void post(CUhostFn fn, void* data);

 private:
  void loop();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::pair<CUhostFn, void*>> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

/// Its destructor has the janitor call `destroy`.
struct UserObject {
  UserObject(Janitor& owner, CUhostFn fn, void* ptr, unsigned references)
      : janitor(owner), destroy(fn), data(ptr), num_references(references) {}
  ~UserObject() { janitor.post(destroy, data); }
  UserObject(const UserObject&) = delete;
  UserObject& operator=(const UserObject&) = delete;

  Janitor& janitor;
  CUhostFn destroy;
  void* data;
  unsigned num_references;  ///< Of the caller.
};

/// A launch with its parameters copied.
struct KernelCall {
  CUfunction handle = nullptr;
  std::shared_ptr<Function> function;
  CUcontext context = nullptr;
  Dim3 grid, block;
  unsigned shared_bytes = 0;
  bool cooperative = false;
  std::vector<std::vector<std::byte>> values;
  std::vector<void*> params;  ///< Into `values`.
};

struct Node {
  CUgraphNode handle = nullptr;
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  std::vector<Node*> after;
  std::function<CUresult()> run;
  std::shared_ptr<KernelCall> kernel;
  std::shared_ptr<Graph> child;
  CUgraph child_handle = nullptr;
};

struct Graph {
  std::vector<std::shared_ptr<Node>> nodes;  ///< Each after what it depends on.
  std::vector<std::shared_ptr<UserObject>> objects;
  CUcontext context = nullptr;
};

struct GraphExec {
  Graph graph;
  Context* context = nullptr;
  DonePtr last;  ///< Replays of one exec never overlap.
};

struct Capture {
  std::uint64_t id = 0;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id thread;
  Context* context = nullptr;
  Stream* origin = nullptr;
  bool is_invalid = false;
  bool is_ended = false;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  CUgraph graph_handle = nullptr;            ///< Null until somebody asks.
  std::vector<std::unique_ptr<Node>> forks;  ///< Where streams were taken in; no part of the graph.
};

struct Stream {
  std::shared_ptr<Context> context;  ///< A worker may be at a stream whose context has gone.
  bool is_blocking = false;          ///< Ordered with the null stream.
  int priority = 0;
  std::deque<Work> queue;
  bool is_served = false;  ///< A worker is at it.
  DonePtr last;            ///< Of the work enqueued last.
  std::shared_ptr<Capture> capture;
  std::vector<Node*> tail;  ///< What the next node of the capture comes after.
};

struct Event {
  Context* context = nullptr;
  bool is_timed = false;
  DonePtr record;  ///< Null: never recorded, or captured.
  std::shared_ptr<Capture> capture;
  std::vector<Node*> tail;
};

enum class BlockKind { device, managed, pinned, registered, global, foreign };

struct Block {
  BlockKind kind = BlockKind::device;
  std::uint64_t bytes = 0;
  std::uint64_t charged = 0;  ///< Of the device's memory.
  Context* context = nullptr;
  bool is_going = false;  ///< A free of it waits for work.
  std::shared_ptr<std::byte> memory;
};

struct Device {
  DeviceOptions options;
  std::shared_ptr<Context> primary;
  CUcontext primary_handle = nullptr;
  std::uint64_t used_bytes = 0;
  CUresult sticky = CUDA_SUCCESS;  ///< Outlives the context: a lost process stays lost.
};

struct Context {
  Device* device = nullptr;
  int ordinal = 0;
  int num_retains = 0;
  CUresult sticky = CUDA_SUCCESS;
  std::shared_ptr<Stream> null_stream;        ///< Refers back, as the other streams do; cut in destroy_primary.
  std::set<std::shared_ptr<Stream>> streams;  ///< Live.
  std::set<std::shared_ptr<Stream>> busy;     ///< With work, the destroyed ones too.
  std::set<Context*> peers;
};

// ---- the whole ----

struct Injection {
  std::uint64_t at = 0;  ///< Of all calls, or of those of `function`.
  int function = -1;
  CUresult code = CUDA_SUCCESS;
};

struct State {
  explicit State(Options given);
  ~State();

  Janitor janitor;  ///< Before all that posts to it.
  std::mutex mutex;
  std::condition_variable changed;  ///< Some work ended, or a context was lost.
  Options options;
  const std::uint32_t number;  ///< Devices of different fakes are different devices.
  std::deque<Device> devices;
  bool is_initialised = false;
  bool is_stopping = false;

  Table<CUcontext, Context> contexts;
  Table<CUstream, Stream> streams;
  Table<CUevent, Event> events;
  Table<CUgraph, Graph> graphs;
  Table<CUgraphExec, GraphExec> execs;
  Table<CUgraphNode, Node> nodes;  ///< Of live graphs.
  Table<CUuserObject, UserObject> user_objects;
  Table<CUmodule, Module> modules;
  Table<CUfunction, Function> functions;
  std::map<std::uint64_t, Block> blocks;
  std::vector<std::shared_ptr<Capture>> captures;  ///< Open.
  std::uint64_t num_captures = 0;
  std::uint64_t num_lazy_loads = 0;
  std::vector<std::string> misuses;
  std::vector<std::string> dropped;
  std::map<std::pair<std::string, std::string>, host::KernelFn> kernels;
  std::list<std::string> images;

  // Logs have a lock of their own, held while their callbacks run.
  struct LogCallback {
    CUlogsCallback fn;
    void* data;
  };
  void write_log(const std::string& text);
  std::mutex log_mutex;
  std::map<std::uintptr_t, LogCallback> log_callbacks;
  std::uintptr_t last_log_callback = 0;

  // Calls; a lock of their own, since they are counted before anything is known.
  mutable std::mutex call_mutex;
  std::uint64_t num_calls = 0;
  std::vector<std::uint64_t> calls_of;
  std::vector<Injection> injections;
  int failed_function = -1;

  // ---- what calls are made of; `lock` is of `mutex` ----
  using Lock = std::unique_lock<std::mutex>;

  void misuse(std::string text) { misuses.push_back(std::move(text)); }
  /// Appends work to a stream that is not captured.
  DonePtr enqueue(Lock& lock, const std::shared_ptr<Stream>& stream, Work work);
  /// Waits for `done`; the context's sticky code ends it early.
  CUresult wait(Lock& lock, const Context& context, const DonePtr& done);
  /// Waits for everything that the context has been given so far.
  CUresult wait_for_all(Lock& lock, const Context& context);
  /// Called without the lock.
  void fault(Context& context, CUresult code, const std::string& text);

  /// The block that holds all of [address, address + bytes), or null.
  Block* find_block(std::uint64_t address, std::uint64_t bytes);
  CUresult allocate(Context& context, BlockKind kind, std::uint64_t bytes, std::uint64_t* address);
  void release_block(std::uint64_t base);

  /// Makes every open capture that forbids it on this thread invalid; the code to answer.
  CUresult unsafe();
  CUresult invalidate(Capture& capture, CUresult code) {
    capture.is_invalid = true;
    return code;
  }
  void end(Capture& capture);
  /// Gives the nodes of a graph handles.
  void publish(Graph& graph);
  void retract(Graph& graph);
  void destroy_primary(Lock& lock, Device& device);

 private:
  struct Worker {
    std::condition_variable wake;
    std::shared_ptr<Stream> stream;
    std::thread thread;
    bool has_ended = false;
  };
  void serve(const std::shared_ptr<Stream>& stream);
  void loop(Worker& worker);
  void run_queue(Lock& lock, Stream& stream);
  void run_one(Lock& lock, Stream& stream, Work work);
  bool is_ready(const Work& work) const {
    return std::all_of(work.after.begin(), work.after.end(), [](const DonePtr& d) { return d->is_done; });
  }

  std::list<Worker> workers_;
  std::vector<Worker*> idle_;
};

/// The fake that calls reach now; null: none.
extern std::atomic<State*> current_state;

// ---- calls ----

enum : unsigned {
  kAnywhere = 0,
  kInContext = 1,  ///< Needs a context that is current and not lost.
  kUnsafe = 2,     ///< Forbidden by a capture that is not relaxed, and ends it.
};

/// One call of the table: has the lock and what the call needs. `code` is not success: answer it.
struct Call {
  explicit Call(unsigned needs);
  explicit operator bool() const { return code == CUDA_SUCCESS; }
  State* operator->() const { return state; }

  /// The stream of a handle, of this context or another. Sets `code`.
  std::shared_ptr<Stream> stream(CUstream handle);
  std::shared_ptr<Event> event(CUevent handle);

  State* state = nullptr;
  State::Lock lock;
  std::shared_ptr<Context> context;
  CUresult code = CUDA_SUCCESS;
};

/// Runs on the stream, or becomes a node of what it captures.
CUresult submit(Call& call, const std::shared_ptr<Stream>& stream, CUgraphNodeType type, std::function<CUresult()> run,
                std::shared_ptr<KernelCall> kernel = nullptr, DonePtr* done = nullptr);

/// Current context of the calling thread, and whether a host function runs on it.
extern thread_local CUcontext current_context;
extern thread_local bool in_host_function;
/// How much this thread cares for captures when it calls what is unsafe in one.
extern thread_local CUstreamCaptureMode thread_capture_mode;

}  // namespace metrale::fake_cuda
