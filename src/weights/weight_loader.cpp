// SPDX-License-Identifier: Apache-2.0
#include "weights/weight_loader.h"

#include <algorithm>
#include <array>
#include <optional>

#include "metrale/event.h"
#include "metrale/pinned_buffer.h"
#include "metrale/stream.h"

namespace metrale::weights {
namespace {

// Reading across a gap this large costs less than starting another read.
constexpr std::uint64_t kMaxGapBytes = 4096;
// Results of transforms start on a cache line.
constexpr std::uint64_t kOutAlignment = 64;

class Cutter {
 public:
  Cutter(const WeightPlan& plan, std::uint64_t staging_bytes) : plan_(plan), staging_(std::max<std::uint64_t>(staging_bytes, 1)) {}

  std::vector<LoadRead> cut() {
    for (std::size_t i = 0; i < plan_.entries().size(); ++i) add(i);
    return std::move(reads_);
  }

 private:
  void add(std::size_t index) {
    const WeightPlan::Entry& entry = plan_.entries()[index];
    // Without a transform any byte may be cut at; with one, granules of rows.
    std::uint64_t unit_in = 1, unit_out = 1, unit_rows = 0;
    if (entry.transform && entry.size_bytes != 0) {
      unit_rows = std::min(entry.transform->granule_rows, entry.tensor->num_rows());
      unit_in = size_bytes(*entry.tensor->dtype, entry.tensor->num_cols()).value_or(0) * unit_rows;
      unit_out = size_bytes(entry.dtype, entry.shape.empty() ? 1 : entry.shape.back()).value_or(0) * unit_rows;
    }
    std::uint64_t done = 0, row = 0, written = 0;
    while (done < entry.tensor->size_bytes && entry.size_bytes != 0) {
      const std::uint64_t left = entry.tensor->size_bytes - done;
      const std::uint64_t units = std::max<std::uint64_t>(room_at(entry, done, std::min(left, unit_in)) / unit_in, 1);
      const std::uint64_t take = units > left / unit_in ? left : units * unit_in;
      const std::uint64_t out = take == left ? entry.size_bytes - written : units * unit_out;
      append(index, entry, {.first_row = row, .in_bytes = take, .dst_offset = written, .dst_bytes = out}, done);
      done += take;
      written += out;
      row += units * unit_rows;
    }
  }

  // Bytes that the current read can take from `done` of the entry on. Starts a new read where the entry does not follow the current
  // one or less than `least` fits.
  std::uint64_t room_at(const WeightPlan::Entry& entry, std::uint64_t done, std::uint64_t least) {
    const std::uint64_t offset = entry.tensor->offset + done;
    if (!reads_.empty() && reads_.back().file == entry.tensor->file) {
      const LoadRead& read = reads_.back();
      const std::uint64_t end = read.offset + read.bytes;
      if (offset >= end && offset - end <= kMaxGapBytes && offset - read.offset < staging_) {
        const std::uint64_t room = staging_ - (offset - read.offset);
        if (room >= least) return room;
      }
    }
    reads_.push_back({.file = entry.tensor->file, .offset = offset, .bytes = 0, .out_bytes = 0, .pieces = {}});
    return staging_;
  }

  void append(std::size_t index, const WeightPlan::Entry& entry, LoadPiece piece, std::uint64_t done) {
    LoadRead& read = reads_.back();
    piece.entry = index;
    piece.in_offset = entry.tensor->offset + done - read.offset;
    read.bytes = piece.in_offset + piece.in_bytes;
    if (entry.transform) {
      piece.out_offset = round_up(read.out_bytes, kOutAlignment);
      read.out_bytes = piece.out_offset + piece.dst_bytes;
    }
    read.pieces.push_back(piece);
  }

  const WeightPlan& plan_;
  const std::uint64_t staging_;
  std::vector<LoadRead> reads_;
};

// Host memory of one read on its way: pinned where the backend has it.
class Staging {
 public:
  static Result<Staging> create(GpuBackend& backend, std::uint64_t bytes, std::source_location site) {
    Staging staging;
    if (bytes == 0) return staging;
    if (backend.capabilities().has(Capability::pinned_memory)) {
      staging.pinned_ = METRALE_TRY(PinnedBuffer::create(backend, bytes, site));
    } else {
      staging.plain_.resize(static_cast<std::size_t>(bytes));
    }
    return staging;
  }
  std::span<std::byte> bytes() noexcept { return pinned_ ? pinned_.bytes() : std::span(plain_); }
  Result<> release(std::source_location site) { return pinned_.release(site); }

 private:
  PinnedBuffer pinned_;
  std::vector<std::byte> plain_;
};

struct Slot {
  Staging in;   // as the file has it
  Staging out;  // results of transforms
  Event copied;
  std::vector<CopyDesc> copies;
};

class Pipeline {
 public:
  Pipeline(GpuBackend& backend, const WeightFile& file, const WeightPlan& plan, const EntryAddress& address,
           std::source_location site)
      : backend_(backend), file_(file), plan_(plan), address_(address), site_(site) {}

  // Staging must not be given back under a copy, whatever ended the load.
  ~Pipeline() {
    if (stream_) (void)stream_.synchronize(site_);
  }
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  Result<> prepare(std::span<const LoadRead> reads, WeightLoadStats& stats) {
    const Capabilities& can = backend_.capabilities();
    const bool overlap = can.has(Capability::streams) && can.has(Capability::events) && can.has(Capability::pinned_memory);
    if (overlap) stream_ = METRALE_TRY(Stream::create(backend_, 0, site_));
    std::uint64_t in_bytes = 0, out_bytes = 0;
    for (const LoadRead& read : reads) {
      in_bytes = std::max(in_bytes, read.bytes);
      out_bytes = std::max(out_bytes, read.out_bytes);
    }
    num_slots_ = overlap && reads.size() > 1 ? slots_.size() : 1;
    for (std::size_t i = 0; i < num_slots_; ++i) {
      slots_[i].in = METRALE_TRY(Staging::create(backend_, in_bytes, site_));
      slots_[i].out = METRALE_TRY(Staging::create(backend_, out_bytes, site_));
      if (overlap) slots_[i].copied = METRALE_TRY(Event::create(backend_, site_));
    }
    stats.staging_bytes = num_slots_ * (in_bytes + out_bytes);
    return {};
  }

  Result<> carry_out(const LoadRead& read) {
    Slot& slot = slots_[next_];
    next_ = (next_ + 1) % num_slots_;
    if (stream_) METRALE_TRY(slot.copied.synchronize(site_));
    const std::span<std::byte> in = slot.in.bytes().first(static_cast<std::size_t>(read.bytes));
    // All of a read belongs to one file, and the first piece starts it.
    METRALE_TRY(file_.read_file(read.file, read.offset, in));
    slot.copies.clear();
    for (const LoadPiece& piece : read.pieces) METRALE_TRY(stage(piece, in, slot));
    return send(slot);
  }

  Result<> finish() {
    if (stream_) METRALE_TRY(stream_.synchronize(site_));
    for (Slot& slot : slots_) {
      METRALE_TRY(slot.in.release(site_));
      METRALE_TRY(slot.out.release(site_));
    }
    return {};
  }

 private:
  Result<> stage(const LoadPiece& piece, std::span<const std::byte> in, Slot& slot) {
    const WeightPlan::Entry& entry = plan_.entries()[piece.entry];
    std::span<const std::byte> bytes =
        in.subspan(static_cast<std::size_t>(piece.in_offset), static_cast<std::size_t>(piece.in_bytes));
    if (entry.transform) {
      const std::span<std::byte> out =
          slot.out.bytes().subspan(static_cast<std::size_t>(piece.out_offset), static_cast<std::size_t>(piece.dst_bytes));
      METRALE_TRY(entry.transform->apply(*entry.tensor, piece.first_row, bytes, out));
      bytes = out;
    }
    slot.copies.push_back({.dst = address_(entry).offset(piece.dst_offset),
                           .src = {},
                           .host_dst = nullptr,
                           .host_src = bytes.data(),
                           .bytes = piece.dst_bytes});
    return {};
  }

  Result<> send(Slot& slot) {
    if (stream_) {
      METRALE_TRY(backend_.copy_batch_async(slot.copies, stream_.handle(), site_));
      return slot.copied.record(stream_.handle(), site_);
    }
    for (const CopyDesc& copy : slot.copies) {
      METRALE_TRY(backend_.copy_h2d(copy.dst, {static_cast<const std::byte*>(copy.host_src), copy.bytes}, site_));
    }
    return {};
  }

  GpuBackend& backend_;
  const WeightFile& file_;
  const WeightPlan& plan_;
  const EntryAddress& address_;
  std::source_location site_;
  std::array<Slot, 2> slots_;
  std::size_t num_slots_ = 1;
  std::size_t next_ = 0;
  Stream stream_;  // null: copies block
};

}  // namespace

std::vector<LoadRead> cut_into_reads(const WeightPlan& plan, std::uint64_t staging_bytes) {
  return Cutter(plan, staging_bytes).cut();
}

Result<> run_reads(GpuBackend& backend, const WeightFile& file, const WeightPlan& plan, std::span<const LoadRead> reads,
                   const EntryAddress& address, const WeightLoadOptions& options, WeightLoadStats& stats,
                   std::source_location site) {
  std::uint64_t total = 0;
  for (const LoadRead& read : reads) total += read.bytes;
  Pipeline pipeline(backend, file, plan, address, site);
  METRALE_TRY(pipeline.prepare(reads, stats));
  for (const LoadRead& read : reads) {
    METRALE_TRY(pipeline.carry_out(read));
    if (options.drop_page_cache) file.drop_cached(read.file, read.offset, read.bytes);
    stats.read_bytes += read.bytes;
    if (options.progress) options.progress(stats.read_bytes, total);
  }
  return pipeline.finish();
}

}  // namespace metrale::weights
