// SPDX-License-Identifier: Apache-2.0
#include "metrale/bridges/communicator.h"

#include <fmt/format.h>

#include <limits>
#include <new>

namespace metrale {
namespace {

/// Whether ranges [a, a + a_bytes) and [b, b + b_bytes) share a byte. Neither wraps.
bool overlap(DevicePtr a, std::uint64_t a_bytes, DevicePtr b, std::uint64_t b_bytes) {
  return a.address < b.address + b_bytes && b.address < a.address + a_bytes;
}

bool is_reduction(CollectiveKind kind) { return kind == CollectiveKind::all_reduce || kind == CollectiveKind::reduce_scatter; }

bool can_reduce(DType type) {
  switch (type) {
    case DType::f32:
    case DType::f64:
    case DType::f16:
    case DType::bf16:
    case DType::i8:
    case DType::u8:
    case DType::i32:
    case DType::u32:
    case DType::i64:
    case DType::u64: return true;
    default: return false;
  }
}

Error wrong(const Collective& call, std::string_view why) {
  return Error(Errc::invalid_argument, fmt::format("{}: {}", describe(call), why));
}

Result<> check_address(const Collective& call, std::string_view what, DevicePtr ptr, std::uint64_t bytes) {
  if (!ptr) return wrong(call, fmt::format("{} is null", what));
  const std::uint64_t element = dtype_facts(call.dtype).block_bytes;
  if (ptr.address % element != 0)
    return wrong(call, fmt::format("{} {:#x} is not aligned to the {} bytes of an element", what, ptr.address, element));
  if (bytes > std::numeric_limits<std::uint64_t>::max() - ptr.address) {
    return Error(Errc::out_of_range,
                 fmt::format("{}: {} bytes from {} {:#x} leave the address space", describe(call), bytes, what, ptr.address));
  }
  return {};
}

}  // namespace

std::string_view to_string(CollectiveKind kind) noexcept {
  switch (kind) {
    case CollectiveKind::all_reduce: return "all_reduce";
    case CollectiveKind::all_gather: return "all_gather";
    case CollectiveKind::reduce_scatter: return "reduce_scatter";
    case CollectiveKind::broadcast: return "broadcast";
    case CollectiveKind::send: return "send";
    case CollectiveKind::receive: return "receive";
  }
  return "?";
}

std::string_view to_string(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::sum: return "sum";
    case ReduceOp::product: return "product";
    case ReduceOp::min: return "min";
    case ReduceOp::max: return "max";
    case ReduceOp::average: return "average";
  }
  return "?";
}

std::string describe(const Collective& call) {
  std::string text = fmt::format("{} of {} {}", to_string(call.kind), call.count, to_string(call.dtype));
  if (is_reduction(call.kind)) return fmt::format("{}, {}", text, to_string(call.op));
  if (call.kind == CollectiveKind::broadcast || call.kind == CollectiveKind::receive)
    return fmt::format("{} from rank {}", text, call.peer);
  return call.kind == CollectiveKind::send ? fmt::format("{} to rank {}", text, call.peer) : text;
}

CollectiveBytes bytes_of(const Collective& call, std::uint32_t rank, std::uint32_t size) noexcept {
  const std::uint64_t part = call.count * dtype_facts(call.dtype).block_bytes;
  switch (call.kind) {
    case CollectiveKind::all_reduce: return {part, part};
    case CollectiveKind::all_gather: return {part, part * size};
    case CollectiveKind::reduce_scatter: return {part * size, part};
    case CollectiveKind::broadcast: return {rank == call.peer ? part : 0, part};
    case CollectiveKind::send: return {part, 0};
    case CollectiveKind::receive: return {0, part};
  }
  return {};
}

Result<> check(const Collective& call, std::uint32_t rank, std::uint32_t size) {
  if (size == 0 || rank >= size) return wrong(call, fmt::format("rank {} of {} is none", rank, size));
  if (call.kind > CollectiveKind::receive || call.op > ReduceOp::average)
    return Error(Errc::invalid_argument, "a collective whose kind or operation has no name");
  if (call.dtype > DType::q6_k) return Error(Errc::invalid_argument, "a collective of a type that has no name");
  if (is_quantised(call.dtype))
    return Error(Errc::unsupported, fmt::format("{}: a quantised type has no elements to move or add; dequantise it, or move its "
                                                "blocks as u8",
                                                describe(call)));
  if (is_reduction(call.kind) && !can_reduce(call.dtype)) {
    return Error(Errc::unsupported,
                 fmt::format("{}: ranks add up f16, bf16, f32, f64 and whole numbers of 8, 32 and 64 bits", describe(call)));
  }
  if (call.count == 0) return wrong(call, "no elements; leave the call out, on every rank");
  const std::uint64_t element = dtype_facts(call.dtype).block_bytes;
  if (call.count > std::numeric_limits<std::uint64_t>::max() / 2 / element / size)
    return Error(Errc::out_of_range, fmt::format("{}: its bytes over {} ranks overflow", describe(call), size));
  const bool has_peer =
      call.kind == CollectiveKind::broadcast || call.kind == CollectiveKind::send || call.kind == CollectiveKind::receive;
  if (has_peer && call.peer >= size) return wrong(call, fmt::format("there are {} ranks, the last is {}", size, size - 1));
  if (has_peer && call.kind != CollectiveKind::broadcast && call.peer == rank)
    return wrong(call, "a rank sends nothing to itself; copy within the device");

  const CollectiveBytes bytes = bytes_of(call, rank, size);
  if (bytes.from != 0) METRALE_TRY(check_address(call, "from", call.from, bytes.from));
  if (bytes.to != 0) METRALE_TRY(check_address(call, "to", call.to, bytes.to));
  if (bytes.from == 0 || bytes.to == 0 || !overlap(call.from, bytes.from, call.to, bytes.to)) return {};
  const std::uint64_t part = call.count * element;
  const bool in_place = call.kind == CollectiveKind::all_gather       ? call.from == call.to.offset(part * rank)
                        : call.kind == CollectiveKind::reduce_scatter ? call.to == call.from.offset(part * rank)
                                                                      : call.from == call.to;
  if (!in_place) return wrong(call, "from and to overlap otherwise than in place");
  return {};
}

Result<> Communicator::enqueue_group(std::span<const Collective> calls, StreamHandle stream, Site site) try {
  METRALE_TRY(failure());
  if (calls.empty()) return Error(Errc::invalid_argument, "a group of no calls", site);
  for (std::size_t i = 0; i < calls.size(); ++i) {
    Result<> checked = check(calls[i], rank_, size_);
    const CollectiveBytes bytes = checked ? bytes_of(calls[i], rank_, size_) : CollectiveBytes{};
    if (bytes.from != 0) checked = backend_.check_memory("from", calls[i].from, bytes.from, site);
    if (checked && bytes.to != 0) checked = backend_.check_memory("to", calls[i].to, bytes.to, site);
    if (checked) continue;
    Error error = std::move(checked).error().with_site(site);
    return calls.size() == 1 ? std::move(error) : std::move(error).with_note(fmt::format("call {} of the group", i));
  }
  // Also whether the stream is one: a stream that is none takes no number.
  for (const Collective& call : calls) {
    if (call.from && bytes_of(call, rank_, size_).from != 0) METRALE_TRY(backend_.capture_uses(stream, call.from, site));
    if (call.to && bytes_of(call, rank_, size_).to != 0) METRALE_TRY(backend_.capture_uses(stream, call.to, site));
  }
  return do_enqueue(calls, stream, site);
} catch (const std::bad_alloc&) {
  return Error::no_memory();
}

Result<> Communicator::prepare(StreamHandle stream, std::uint64_t bytes, Site site) try {
  METRALE_TRY(failure());
  METRALE_TRY(backend_.query(stream, site));
  return do_prepare(stream, bytes, site);
} catch (const std::bad_alloc&) {
  return Error::no_memory();
}

Result<> Communicator::trim(Site site) { return do_trim(site); }

Result<> Communicator::synchronize(StreamHandle stream, Site site) {
  METRALE_TRY(failure());
  METRALE_TRY(do_synchronize(stream, site));
  return health(site);
}

Result<> Communicator::health(Site site) {
  METRALE_TRY(failure());
  METRALE_TRY(backend_.health(site));
  if (Result<> polled = do_poll(); !polled) return fail(std::move(polled).error());
  return {};
}

void Communicator::abort(std::string_view reason) noexcept {
  if (has_failed_.load(std::memory_order_acquire)) return;
  try {
    static_cast<void>(
        fail(Error(Errc::invalid_argument, fmt::format("the communicator was aborted on rank {}: {}", rank_, reason))));
  } catch (...) {
    // Without memory for a message the others are told all the same.
    do_abort(reason);
  }
}

Error Communicator::fail(Error error) {
  {
    std::lock_guard lock(mutex_);
    if (failure_) return *failure_;
    failure_.emplace(std::move(error));
    has_failed_.store(true, std::memory_order_release);
  }
  do_abort(failure_->message());
  return *failure_;
}

Result<> Communicator::failure() const {
  if (!has_failed_.load(std::memory_order_acquire)) return {};
  std::lock_guard lock(mutex_);
  return *failure_;
}

}  // namespace metrale
