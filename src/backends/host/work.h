// SPDX-License-Identifier: Apache-2.0
//
// What a stream does, as records in memory: a queue and a graph are the same thing, a WorkBuffer, so that replaying a graph is a
// walk over bytes that were laid out once. A record is a `Work` header, the fields of its kind, and a payload behind them. One
// thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "metrale/backend_hooks.h"
#include "metrale/backends/host_kernel.h"

namespace metrale::host {

class Event;
class Graph;
class Stream;

/// Counts the work of a stream; ticket n is done when n records of the stream have run.
using Ticket = std::uint64_t;

enum class WorkKind : std::uint32_t { copy, copy_2d, fill, launch, call, wait, stamp, replay, destroyed };

struct Work {
  WorkKind kind;
  std::uint32_t record_bytes = 0;  ///< To the next record.
};
struct CopyWork : Work {
  static constexpr WorkKind kKind = WorkKind::copy;
  std::byte* dst;
  const std::byte* src;  ///< Of a staged copy: the record's payload, or `owned`.
  std::uint64_t bytes;
  std::byte* owned;  ///< Freed with the record.
};
struct Copy2DWork : Work {
  static constexpr WorkKind kKind = WorkKind::copy_2d;
  std::byte* dst;
  const std::byte* src;
  std::uint64_t dst_pitch;
  std::uint64_t src_pitch;
  std::uint64_t width;
  std::uint64_t height;

  void run() const noexcept {
    for (std::uint64_t row = 0; row < height; ++row) std::memmove(dst + row * dst_pitch, src + row * src_pitch, width);
  }
};
struct FillWork : Work {
  static constexpr WorkKind kKind = WorkKind::fill;
  std::byte* dst;
  std::uint64_t bytes;
  std::uint8_t value;
};
struct LaunchWork : Work {
  static constexpr WorkKind kKind = WorkKind::launch;
  const HostKernel* kernel;
  Dim3 grid;
  Dim3 block;
  std::uint32_t shared_bytes;
  const void* const* params;  ///< In the payload, as are the arguments they point to.
};
struct CallWork : Work {
  static constexpr WorkKind kKind = WorkKind::call;
  std::function<void()> fn;
};
struct WaitWork : Work {
  static constexpr WorkKind kKind = WorkKind::wait;
  Stream* stream;
  Ticket ticket;
};
struct StampWork : Work {
  static constexpr WorkKind kKind = WorkKind::stamp;
  Event* event;
  std::uint64_t recording;  ///< Which recording of the event: a later one makes this one void.
};
struct ReplayWork : Work {
  static constexpr WorkKind kKind = WorkKind::replay;
  const Graph* graph;
};

class WorkBuffer {
 public:
  WorkBuffer() = default;
  WorkBuffer(WorkBuffer&& other) noexcept { swap(other); }
  WorkBuffer& operator=(WorkBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  WorkBuffer(const WorkBuffer&) = delete;
  WorkBuffer& operator=(const WorkBuffer&) = delete;
  ~WorkBuffer() { clear(); }

  /// Appends a record with room for `payload_bytes` behind it, 16-byte aligned. Throws bad_alloc, then nothing was appended.
  template <class T>
  T& append(std::size_t payload_bytes = 0) {
    T* record = ::new (reserve(payload_offset<T>() + payload_bytes)) T();
    record->kind = T::kKind;
    record->record_bytes = static_cast<std::uint32_t>(last_record_bytes_);
    commit();
    return *record;
  }
  template <class T>
  static std::byte* payload(T& record) {
    return reinterpret_cast<std::byte*>(&record) + payload_offset<T>();
  }

  bool empty() const noexcept { return num_records_ == 0; }
  std::size_t num_records() const noexcept { return num_records_; }
  void swap(WorkBuffer& other) noexcept;
  /// Destroys all records and keeps some memory for the next ones.
  void clear() noexcept;
  /// Frees what a record owns; a second call does nothing.
  static void destroy(Work& work) noexcept;

  /// Walks the records in order. Invalid after `clear` and `swap` of the buffer.
  class Cursor {
   public:
    Cursor() = default;
    explicit Cursor(const WorkBuffer& buffer) : buffer_(&buffer) { settle(); }
    Work* get() const noexcept { return record_; }
    void advance() noexcept {
      offset_ += record_->record_bytes;
      settle();
    }

   private:
    void settle() noexcept;
    const WorkBuffer* buffer_ = nullptr;
    std::size_t chunk_ = 0;
    std::size_t offset_ = 0;
    Work* record_ = nullptr;
  };
  /// Says that every record was destroyed, which spares `clear` a walk.
  void forget() noexcept { may_own_ = false; }

 private:
  static constexpr std::size_t kAlignment = 16;
  static constexpr std::size_t kChunkBytes = 16 << 10;
  static constexpr std::size_t kKeptChunks = 4;

  struct alignas(kAlignment) Unit {
    std::byte bytes[kAlignment];
  };
  struct Chunk {
    std::unique_ptr<Unit[]> memory;
    std::size_t capacity = 0;
    std::size_t used = 0;
  };

  template <class T>
  static constexpr std::size_t payload_offset() {
    return (sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  }
  void* reserve(std::size_t bytes);
  void commit() noexcept;

  std::vector<Chunk> chunks_;
  std::size_t current_ = 0;  ///< The chunk that records go to.
  std::size_t num_records_ = 0;
  bool may_own_ = false;
  std::size_t last_record_bytes_ = 0;
};

}  // namespace metrale::host
