// SPDX-License-Identifier: Apache-2.0
#include "backends/host/workers.h"

#include <new>

#include "backends/host/status.h"
#include "backends/host/stream.h"

namespace metrale::host {

namespace {
constexpr std::align_val_t kScratchAlignment{64};
}

std::byte* Scratch::get(std::size_t bytes) noexcept {
  if (bytes > bytes_) {
    if (memory_ != nullptr) ::operator delete(memory_, kScratchAlignment);
    memory_ = static_cast<std::byte*>(::operator new(bytes, kScratchAlignment, std::nothrow));
    bytes_ = memory_ == nullptr ? 0 : bytes;
  }
  return memory_;
}

Scratch::~Scratch() {
  if (memory_ != nullptr) ::operator delete(memory_, kScratchAlignment);
}

Result<> Workers::serve(Stream& stream) {
  return guarded("start a thread for a stream", [&]() -> Result<> {
    std::lock_guard lock(mutex_);
    if (idle_.empty()) {
      all_.reserve(all_.size() + 1);
      idle_.reserve(all_.size() + 1);  // so that a worker that becomes idle needs no memory
      auto worker = std::make_unique<Worker>();
      worker->stream = &stream;
      worker->thread = std::thread([this, w = worker.get()] { loop(*w); });
      all_.push_back(std::move(worker));
      return {};
    }
    Worker& worker = *idle_.back();
    idle_.pop_back();
    {
      std::lock_guard worker_lock(worker.mutex);
      worker.stream = &stream;
    }
    worker.wake.notify_one();
    return {};
  });
}

void Workers::loop(Worker& worker) {
  for (;;) {
    Stream* stream = nullptr;
    {
      std::unique_lock lock(worker.mutex);
      worker.wake.wait(lock, [&] { return worker.stream != nullptr || worker.stopping; });
      stream = worker.stream;
      worker.stream = nullptr;
    }
    if (stream == nullptr) return;
    stream->run(worker.scratch);
    std::lock_guard lock(mutex_);
    idle_.push_back(&worker);
  }
}

void Workers::stop() noexcept {
  std::vector<std::unique_ptr<Worker>> all;
  {
    std::lock_guard lock(mutex_);
    all.swap(all_);
  }
  for (auto& worker : all) {
    {
      std::lock_guard lock(worker->mutex);
      worker->stopping = true;
    }
    worker->wake.notify_one();
  }
  for (auto& worker : all) worker->thread.join();
  std::lock_guard lock(mutex_);
  idle_.clear();
}

}  // namespace metrale::host
