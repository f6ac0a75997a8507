// SPDX-License-Identifier: Apache-2.0
#include "backends/host/work.h"

#include <algorithm>
#include <utility>

namespace metrale::host {

void* WorkBuffer::reserve(std::size_t bytes) {
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  while (current_ < chunks_.size() && chunks_[current_].capacity - chunks_[current_].used < bytes) ++current_;
  if (current_ == chunks_.size()) {
    const std::size_t capacity = std::max(bytes, kChunkBytes);
    Chunk chunk{std::unique_ptr<Unit[]>(new Unit[capacity / kAlignment]), capacity, 0};
    chunks_.push_back(std::move(chunk));
  }
  last_record_bytes_ = bytes;
  return reinterpret_cast<std::byte*>(chunks_[current_].memory.get()) + chunks_[current_].used;
}

void WorkBuffer::commit() noexcept {
  chunks_[current_].used += last_record_bytes_;
  ++num_records_;
  may_own_ = true;
}

void WorkBuffer::swap(WorkBuffer& other) noexcept {
  chunks_.swap(other.chunks_);
  std::swap(current_, other.current_);
  std::swap(num_records_, other.num_records_);
  std::swap(may_own_, other.may_own_);
  std::swap(last_record_bytes_, other.last_record_bytes_);
}

void WorkBuffer::destroy(Work& work) noexcept {
  switch (work.kind) {
    case WorkKind::copy: delete[] static_cast<CopyWork&>(work).owned; break;
    case WorkKind::call: static_cast<CallWork&>(work).~CallWork(); break;
    default: break;  // the others own nothing
  }
  work.kind = WorkKind::destroyed;
}

void WorkBuffer::clear() noexcept {
  if (may_own_) {
    for (Cursor cursor(*this); cursor.get() != nullptr;) {
      Work& work = *cursor.get();
      cursor.advance();
      destroy(work);
    }
  }
  if (chunks_.size() > kKeptChunks) chunks_.resize(kKeptChunks);
  for (Chunk& chunk : chunks_) {
    if (chunk.capacity > kChunkBytes) chunk = Chunk{};
    chunk.used = 0;
  }
  std::erase_if(chunks_, [](const Chunk& chunk) { return chunk.capacity == 0; });
  current_ = 0;
  num_records_ = 0;
  may_own_ = false;
}

void WorkBuffer::Cursor::settle() noexcept {
  while (chunk_ < buffer_->chunks_.size() && offset_ == buffer_->chunks_[chunk_].used) {
    ++chunk_;
    offset_ = 0;
  }
  record_ = chunk_ == buffer_->chunks_.size()
                ? nullptr
                : reinterpret_cast<Work*>(reinterpret_cast<std::byte*>(buffer_->chunks_[chunk_].memory.get()) + offset_);
}

}  // namespace metrale::host
