// SPDX-License-Identifier: Apache-2.0
//
// How streams run: each with work holds a worker thread for itself, so a held stream holds no other. Idle workers go after a while.
#include "support/fake_cuda/state.h"

namespace metrale::fake_cuda {

namespace {
constexpr std::chrono::milliseconds kIdle{50};
}

thread_local CUcontext current_context = nullptr;
thread_local bool in_host_function = false;
thread_local CUstreamCaptureMode thread_capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
std::atomic<State*> current_state{nullptr};

// ---- workers ----

DonePtr State::enqueue(Lock& lock, const std::shared_ptr<Stream>& stream, Work work) {
  Context& context = *stream->context;
  DonePtr done = work.done;
  // The null stream and the blocking ones wait for each other.
  if (stream == context.null_stream) {
    for (const auto& other : context.streams) {
      if (other->is_blocking && other->last && !other->last->is_done) work.after.push_back(other->last);
    }
  } else if (stream->is_blocking && context.null_stream->last && !context.null_stream->last->is_done) {
    work.after.push_back(context.null_stream->last);
  }
  stream->last = done;
  const bool idle = !stream->is_served && stream->queue.empty();
  if (idle && !work.run && is_ready(work)) {
    done->is_done = true;
    done->at = Clock::now();
    return done;
  }
  context.busy.insert(stream);
  if (idle && options.runs_when_idle && !work.is_host_function && is_ready(work)) {
    stream->is_served = true;
    run_one(lock, *stream, std::move(work));
    stream->is_served = false;
    if (stream->queue.empty()) {
      context.busy.erase(stream);
    } else {
      serve(stream);
    }
    return done;
  }
  stream->queue.push_back(std::move(work));
  if (!stream->is_served) serve(stream);
  return done;
}

void State::serve(const std::shared_ptr<Stream>& stream) {
  stream->is_served = true;
  if (!idle_.empty()) {
    Worker* worker = idle_.back();
    idle_.pop_back();
    worker->stream = stream;
    worker->wake.notify_one();
    return;
  }
  for (auto at = workers_.begin(); at != workers_.end();) {
    if (at->has_ended) {
      at->thread.join();
      at = workers_.erase(at);
    } else {
      ++at;
    }
  }
  Worker& worker = workers_.emplace_back();
  worker.stream = stream;
  worker.thread = std::thread([this, &worker] { loop(worker); });
}

void State::loop(Worker& worker) {
  Lock lock(mutex);
  for (;;) {
    const bool woken = worker.wake.wait_for(lock, kIdle, [&] { return worker.stream != nullptr || is_stopping; });
    if (worker.stream == nullptr) {
      if (!woken) std::erase(idle_, &worker);
      worker.has_ended = true;
      return;
    }
    const std::shared_ptr<Stream> stream = std::move(worker.stream);
    worker.stream = nullptr;
    run_queue(lock, *stream);
    stream->is_served = false;
    stream->context->busy.erase(stream);
    idle_.push_back(&worker);
  }
}

void State::run_queue(Lock& lock, Stream& stream) {
  while (!stream.queue.empty()) {
    const auto lost = [&] { return stream.context->sticky != CUDA_SUCCESS; };
    if (!lost() && !is_ready(stream.queue.front())) {
      changed.wait(lock, [&] { return lost() || is_stopping || is_ready(stream.queue.front()); });
    }
    if (lost() || (is_stopping && !is_ready(stream.queue.front()))) {
      // What was enqueued is dropped, and nobody who waits for it waits on.
      const std::deque<Work> dropped_work = std::move(stream.queue);
      stream.queue.clear();
      changed.notify_all();
      lock.unlock();
      lock.lock();
      continue;
    }
    Work work = std::move(stream.queue.front());
    stream.queue.pop_front();
    run_one(lock, stream, std::move(work));
  }
}

void State::run_one(Lock& lock, Stream& stream, Work work) {
  CUresult code = CUDA_SUCCESS;
  if (work.run) {
    Context& context = *stream.context;
    lock.unlock();
    in_host_function = work.is_host_function;
    code = work.run();
    in_host_function = false;
    work.run = nullptr;
    if (code != CUDA_SUCCESS) fault(context, code, "a kernel faulted");
    lock.lock();
  }
  if (code == CUDA_SUCCESS) {
    work.done->is_done = true;
    work.done->at = Clock::now();
  }
  changed.notify_all();
}

CUresult State::wait(Lock& lock, const Context& context, const DonePtr& done) {
  if (context.sticky != CUDA_SUCCESS) return context.sticky;
  if (!done) return CUDA_SUCCESS;
  changed.wait(lock, [&] { return done->is_done || context.sticky != CUDA_SUCCESS; });
  return context.sticky;
}

CUresult State::wait_for_all(Lock& lock, const Context& context) {
  std::vector<DonePtr> all;
  for (const auto& stream : context.busy) {
    if (stream->last && !stream->last->is_done) all.push_back(stream->last);
  }
  for (const DonePtr& done : all) {
    if (const CUresult code = wait(lock, context, done); code != CUDA_SUCCESS) return code;
  }
  return context.sticky;
}

void State::write_log(const std::string& text) {
  const std::lock_guard logs(log_mutex);
  for (const auto& [id, callback] : log_callbacks) {
    std::string line = "[fake driver][E] " + text;
    callback.fn(callback.data, CU_LOG_LEVEL_ERROR, line.data(), line.size());
  }
}

void State::fault(Context& context, CUresult code, const std::string& text) {
  write_log(text);
  const std::lock_guard lock(mutex);
  if (context.sticky == CUDA_SUCCESS) context.sticky = code;
  if (context.device->sticky == CUDA_SUCCESS) context.device->sticky = code;
  changed.notify_all();
}

// ---- start and end ----

namespace {
std::atomic<std::uint32_t> num_states{0};
}

State::State(Options given) : options(std::move(given)), number(++num_states) {
  for (const DeviceOptions& device : options.devices) devices.emplace_back().options = device;
}

State::~State() {
  Lock lock(mutex);
  is_stopping = true;
  changed.notify_all();
  for (Worker& worker : workers_) worker.wake.notify_one();
  while (!workers_.empty()) {
    std::thread ending = std::move(workers_.front().thread);
    lock.unlock();
    ending.join();
    lock.lock();
    workers_.pop_front();
  }
  // Contexts that were never released refer to their streams, which refer back.
  for (Device& device : devices) {
    if (device.primary == nullptr) continue;
    device.primary->streams.clear();
    device.primary->busy.clear();
    device.primary->null_stream = nullptr;
  }
}

Janitor::~Janitor() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void Janitor::post(CUhostFn fn, void* data) {
  const std::lock_guard lock(mutex_);
  queue_.emplace_back(fn, data);
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  wake_.notify_one();
}

void Janitor::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const auto [fn, data] = queue_.front();
    queue_.pop_front();
    lock.unlock();
    in_host_function = true;
    fn(data);
    in_host_function = false;
    lock.lock();
  }
}

}  // namespace metrale::fake_cuda
