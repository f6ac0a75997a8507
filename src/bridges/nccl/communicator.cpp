// SPDX-License-Identifier: Apache-2.0
#include "metrale/bridges/nccl.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>

#include "bridges/nccl/api.h"
#include "bridges/nccl/check.h"
#include "core/release_log.h"

namespace metrale::nccl {
namespace {

using Clock = std::chrono::steady_clock;

struct Form {
  ncclDataType_t type;
  std::uint64_t count;
};

/// Memory that only moves goes as bytes: NCCL has fewer types than we.
Form form_of(const Collective& call) {
  const bool adds = call.kind == CollectiveKind::all_reduce || call.kind == CollectiveKind::reduce_scatter;
  if (!adds) return {ncclUint8, call.count * dtype_facts(call.dtype).block_bytes};
  switch (call.dtype) {
    case DType::f64: return {ncclFloat64, call.count};
    case DType::f16: return {ncclFloat16, call.count};
    case DType::bf16: return {ncclBfloat16, call.count};
    case DType::i8: return {ncclInt8, call.count};
    case DType::u8: return {ncclUint8, call.count};
    case DType::i32: return {ncclInt32, call.count};
    case DType::u32: return {ncclUint32, call.count};
    case DType::i64: return {ncclInt64, call.count};
    case DType::u64: return {ncclUint64, call.count};
    default: return {ncclFloat32, call.count};
  }
}

ncclRedOp_t op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::product: return ncclProd;
    case ReduceOp::min: return ncclMin;
    case ReduceOp::max: return ncclMax;
    case ReduceOp::average: return ncclAvg;
    default: return ncclSum;
  }
}

void* at(DevicePtr ptr) { return reinterpret_cast<void*>(ptr.address); }

/// Longer and longer pauses, so that what is quick is seen quickly and what is slow costs little.
class Pause {
 public:
  void wait() {
    ++turns_;
    if (turns_ < 2000) return std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(turns_ < 4000 ? 20 : 500));
  }
  std::uint32_t turns() const noexcept { return turns_; }

 private:
  std::uint32_t turns_ = 0;
};

/// Ranks of one process that were made together. They end together too, since NCCL lets none go before all on the machine do, and
/// one thread may end them one after another: the last to leave waits for all.
class House {
 public:
  explicit House(std::size_t members) : members_(members) { leaving_.reserve(members); }

  /// `comm` is being finalised; null: it was aborted.
  void leave(const Api& api, ncclComm_t comm) noexcept {
    std::lock_guard lock(mutex_);
    if (comm != nullptr) leaving_.push_back(comm);
    if (--members_ != 0) return;
    const Clock::time_point deadline = Clock::now() + std::chrono::seconds(10);
    for (const ncclComm_t member : leaving_) {
      ncclResult_t state = ncclInProgress;
      while (api.async_error(member, &state) == ncclSuccess && state == ncclInProgress && Clock::now() < deadline)
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      const ncclResult_t ended = state == ncclSuccess ? api.destroy(member) : api.abort(member);
      if (state != ncclSuccess || (ended != ncclSuccess && ended != ncclInProgress)) {
        detail::log_warning_noexcept("a communicator of NCCL was {} with code {}, its state was {}",
                                     state == ncclSuccess ? "destroyed" : "aborted", static_cast<int>(ended),
                                     static_cast<int>(state));
      }
    }
  }

 private:
  std::mutex mutex_;
  std::size_t members_;  ///< that have not left
  std::vector<ncclComm_t> leaving_;
};

class Rank final : public Communicator {
 public:
  Rank(GpuBackend& backend, const Api& api, std::shared_ptr<House> house, std::uint32_t rank, std::uint32_t size,
       const Options& options)
      : Communicator(backend, "nccl " + api.version, rank, size, options.timeout),
        api_(api),
        meeting_timeout_(options.meeting_timeout),
        house_(std::move(house)) {}

  ~Rank() override { close(); }

  /// Begins to make it; `await` ends that.
  Result<> begin(const UniqueId& id, Site site) {
    METRALE_TRY(backend().bind_to_thread(site));
    free_before_ = METRALE_TRY(backend().device_free_memory(site));
    ncclUniqueId native;
    static_assert(sizeof(native) == sizeof(id.bytes));
    std::memcpy(&native, id.bytes.data(), sizeof(native));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    std::lock_guard lock(mutex_);
    const ncclResult_t code = api_.init(&comm_, static_cast<int>(size()), native, static_cast<int>(rank()), &config);
    return api_.check(code, fmt::format("ncclCommInitRankConfig of rank {} of {}", rank(), size()));
  }

  Result<> finish(Clock::time_point deadline, Site site) {
    METRALE_TRY(settle(fmt::format("making rank {} of {}", rank(), size()), deadline));
    const std::uint64_t free_now = METRALE_TRY(backend().device_free_memory(site));
    residual_bytes_ = free_before_ > free_now ? free_before_ - free_now : 0;
    return {};
  }

  std::uint64_t residual_bytes() const noexcept { return residual_bytes_; }

 private:
  /// Waits until the library has done what it was asked for.
  Result<> settle(std::string_view what, Clock::time_point deadline) {
    Pause pause;
    while (true) {
      {
        std::lock_guard lock(mutex_);
        if (comm_ == nullptr) {
          METRALE_TRY(failure());
          return Error(Errc::invalid_argument, fmt::format("{}: the communicator has ended", what));
        }
        ncclResult_t state = ncclSuccess;
        const ncclResult_t code = api_.async_error(comm_, &state);
        METRALE_TRY(api_.check(code, what, comm_));
        METRALE_TRY(api_.check(state, what, comm_));
        if (state == ncclSuccess) return {};
      }
      if (Clock::now() >= deadline)
        return Error(Errc::timeout, fmt::format("{}: not all ranks came in time; see that each of {} runs", what, size()));
      pause.wait();
    }
  }

  ncclResult_t issue(const Collective& call, cudaStream_t stream) {
    const Form form = form_of(call);
    const int peer = static_cast<int>(call.peer);
    switch (call.kind) {
      case CollectiveKind::all_reduce:
        return api_.all_reduce(at(call.from), at(call.to), form.count, form.type, op_of(call.op), comm_, stream);
      case CollectiveKind::all_gather: return api_.all_gather(at(call.from), at(call.to), form.count, form.type, comm_, stream);
      case CollectiveKind::reduce_scatter:
        return api_.reduce_scatter(at(call.from), at(call.to), form.count, form.type, op_of(call.op), comm_, stream);
      case CollectiveKind::broadcast:
        // What a rank that is not the root gives as its own is not read, and null is refused.
        return api_.broadcast(at(rank() == call.peer ? call.from : call.to), at(call.to), form.count, form.type, peer, comm_,
                              stream);
      case CollectiveKind::send: return api_.send(at(call.from), form.count, form.type, peer, comm_, stream);
      case CollectiveKind::receive: return api_.receive(at(call.to), form.count, form.type, peer, comm_, stream);
    }
    return ncclInvalidArgument;
  }

  Result<> issue_all(std::span<const Collective> calls, std::uint64_t native) {
    const auto stream = reinterpret_cast<cudaStream_t>(native);
    std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return Error(Errc::invalid_argument, "the communicator has ended");
    METRALE_TRY(api_.check(api_.group_start(), "ncclGroupStart"));
    // The group has to be ended whatever happens in it.
    ncclResult_t first = ncclSuccess;
    const Collective* wrong = nullptr;
    for (const Collective& call : calls) {
      const ncclResult_t code = issue(call, stream);
      if (code == ncclSuccess || code == ncclInProgress) continue;
      first = code;
      wrong = &call;
      break;
    }
    const ncclResult_t ended = api_.group_end();
    if (wrong != nullptr) return api_.error(first, describe(*wrong), comm_);
    return api_.check(ended, describe(calls.front()), comm_);
  }

  Result<> do_enqueue(std::span<const Collective> calls, StreamHandle stream, Site site) override {
    std::vector<NativeUse> uses;
    for (const Collective& call : calls) {
      const CollectiveBytes bytes = bytes_of(call, rank(), size());
      if (bytes.from != 0) uses.push_back({"from", call.from, bytes.from});
      if (bytes.to != 0) uses.push_back({"to", call.to, bytes.to});
    }
    Result<> settled;
    Result<> enqueued = backend().enqueue_native(
        to_string(calls.front().kind), stream, uses,
        [&](std::uint64_t native) -> Result<> {
          METRALE_TRY(issue_all(calls, native));
          // The library enqueues from a thread of its own: nothing may follow on the stream before it has.
          settled = settle(describe(calls.front()), Clock::now() + meeting_timeout_);
          return settled;
        },
        site);
    // A call that was half made leaves the ranks apart.
    if (!settled) return fail(std::move(enqueued).error());
    return enqueued;
  }

  // What NCCL needs it takes itself, at the first call.
  Result<> do_prepare(StreamHandle, std::uint64_t, Site) override { return {}; }
  Result<> do_trim(Site) override { return {}; }

  Result<> do_poll() override {
    std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return {};
    ncclResult_t state = ncclSuccess;
    METRALE_TRY(api_.check(api_.async_error(comm_, &state), "ncclCommGetAsyncError", comm_));
    return api_.check(state, fmt::format("rank {} of {}", rank(), size()), comm_);
  }

  Result<> do_synchronize(StreamHandle stream, Site site) override {
    const Clock::time_point deadline = Clock::now() + timeout();
    Pause pause;
    while (!METRALE_TRY(backend().query(stream, site))) {
      if (pause.turns() % 256 == 255) {
        METRALE_TRY(failure());
        if (Result<> polled = do_poll(); !polled) return fail(std::move(polled).error());
        if (Clock::now() >= deadline) {
          return fail(
              Error(Errc::timeout, fmt::format("rank {} of {} waited {} ms for its stream; a rank is lost, or the work is longer",
                                               rank(), size(), timeout().count())));
        }
      }
      pause.wait();
    }
    return backend().synchronize(stream, site);
  }

  void do_abort(std::string_view) noexcept override {
    std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return;
    // Ends the kernels that wait for other ranks, and frees what there is.
    if (const ncclResult_t code = api_.abort(std::exchange(comm_, nullptr)); code != ncclSuccess && code != ncclInProgress)
      detail::log_warning_noexcept("ncclCommAbort of rank {} answers {}", rank(), static_cast<int>(code));
  }

  void close() noexcept {
    {
      std::lock_guard lock(mutex_);
      if (comm_ != nullptr) {
        const Result<> begun = api_.check(api_.finalize(comm_), "ncclCommFinalize", comm_);
        if (!begun) detail::log_warning_noexcept("rank {} of {}: {}", rank(), size(), begun.error().message());
      }
    }
    house_->leave(api_, std::exchange(comm_, nullptr));
  }

  const Api& api_;
  const Milliseconds meeting_timeout_;
  const std::shared_ptr<House> house_;
  std::mutex mutex_;           // of comm_: the library's calls on it, and its end
  ncclComm_t comm_ = nullptr;  // null once it was aborted
  std::uint64_t free_before_ = 0;
  std::uint64_t residual_bytes_ = 0;
};

}  // namespace

BridgeStatus status() {
  const Result<const Api*> found = api();
  if (!found) return {.library = "NCCL", .is_available = false, .text = found.error().message()};
  return {.library = "NCCL", .is_available = true, .text = fmt::format("{}, {}", (*found)->version, (*found)->file)};
}

Result<UniqueId> make_unique_id() {
  const Api& a = *METRALE_TRY(api());
  ncclUniqueId native;
  METRALE_TRY(a.check(a.get_unique_id(&native), "ncclGetUniqueId"));
  UniqueId id;
  std::memcpy(id.bytes.data(), &native, sizeof(native));
  return id;
}

Result<std::unique_ptr<Communicator>> create(GpuBackend& backend, const UniqueId& id, std::uint32_t rank, std::uint32_t size,
                                             const Options& options, std::source_location site) try {
  METRALE_TRY(check_rank(rank, size, options, site));
  METRALE_TRY(check_backend(backend, site));
  const Api& a = *METRALE_TRY(api());
  auto made = std::make_unique<Rank>(backend, a, std::make_shared<House>(1), rank, size, options);
  const Clock::time_point deadline = Clock::now() + options.meeting_timeout;
  Result<> done = made->begin(id, site);
  if (done) done = made->finish(deadline, site);
  if (done) return made;
  made->abort(done.error().message());
  return std::move(done).error();
} catch (const std::bad_alloc&) {
  return Error::no_memory();
}

Result<std::vector<std::unique_ptr<Communicator>>> create_all(std::span<GpuBackend* const> backends, const Options& options,
                                                              std::source_location site) try {
  METRALE_TRY(check_world(backends, options, site));
  const Api& a = *METRALE_TRY(api());
  const UniqueId id = METRALE_TRY(make_unique_id());
  const Clock::time_point deadline = Clock::now() + options.meeting_timeout;
  const auto house = std::make_shared<House>(backends.size());
  std::vector<std::unique_ptr<Rank>> ranks;
  Result<> done;
  for (std::uint32_t rank = 0; done && rank < backends.size(); ++rank) {
    ranks.push_back(std::make_unique<Rank>(*backends[rank], a, house, rank, static_cast<std::uint32_t>(backends.size()), options));
    done = ranks.back()->begin(id, site);
  }
  for (const auto& rank : ranks) {
    if (done) done = rank->finish(deadline, site);
  }
  if (!done) {
    for (const auto& rank : ranks) rank->abort(done.error().message());
    return std::move(done).error();
  }
  std::vector<std::unique_ptr<Communicator>> all;
  for (auto& rank : ranks) all.push_back(std::move(rank));
  return all;
} catch (const std::bad_alloc&) {
  return Error::no_memory();
}

Result<std::unique_ptr<Communicator>> join(GpuBackend& backend, const ProcessPlace& place, const Options& options,
                                           std::source_location site) try {
  METRALE_TRY(check_rank(place.rank, place.size, options, site));
  METRALE_TRY(check_backend(backend, site));
  METRALE_TRY(api());
  UniqueId id;
  if (place.rank == 0) id = METRALE_TRY(make_unique_id());
  const std::span<const std::byte> mine = place.rank == 0 ? std::span<const std::byte>(id.bytes) : std::span<const std::byte>();
  const std::vector<std::byte> shared = METRALE_TRY(share_bytes(place, mine, options.meeting_timeout));
  if (shared.size() != id.bytes.size()) {
    return Error(Errc::invalid_argument,
                 fmt::format("rank 0 shares {} bytes, and an id of NCCL has {}; every rank has to run the same "
                             "program",
                             shared.size(), id.bytes.size()),
                 site);
  }
  std::ranges::copy(shared, id.bytes.begin());
  return create(backend, id, place.rank, place.size, options, site);
} catch (const std::bad_alloc&) {
  return Error::no_memory();
}

std::uint64_t residual_bytes(const Communicator& communicator) noexcept {
  const auto* rank = dynamic_cast<const Rank*>(&communicator);
  return rank == nullptr ? 0 : rank->residual_bytes();
}

}  // namespace metrale::nccl
