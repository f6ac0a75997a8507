// SPDX-License-Identifier: Apache-2.0
#include "metrale/bridges/in_process.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "bridges/collective/world.h"
#include "core/release_log.h"
#include "metrale/pinned_buffer.h"

namespace metrale::in_process {
namespace {

constexpr std::uint64_t kAlignment = 64;

class Rank final : public Communicator {
 public:
  Rank(GpuBackend& backend, std::uint32_t rank, std::shared_ptr<World> world, Milliseconds timeout)
      : Communicator(backend, "in-process", rank, world->size(), timeout), world_(std::move(world)) {}

  ~Rank() override {
    world_->leave(rank());
    if (const Result<> given_back = do_trim(Site::current()); !given_back)
      detail::log_warning_noexcept("a communicator's staging was not given back: {}", given_back.error().to_string());
  }

 private:
  /// One stream, in the order in which the communicator met them.
  struct Channel {
    StreamHandle stream;
    PinnedBuffer staging;
    std::vector<PinnedBuffer> outgrown;  ///< Graphs may still name them.
  };

  std::uint32_t channel_of(StreamHandle stream) {
    const auto found = std::ranges::find(channels_, stream, &Channel::stream);
    if (found != channels_.end()) return static_cast<std::uint32_t>(found - channels_.begin());
    channels_.push_back({stream, {}, {}});
    return static_cast<std::uint32_t>(channels_.size() - 1);
  }

  Result<> grow(Channel& channel, std::uint64_t bytes, Site site) {
    if (channel.staging && channel.staging.bytes().size() >= bytes) return {};
    if (backend().stream_is_capturing(channel.stream, site)) {
      return Error(Errc::capture_unsafe,
                   fmt::format("a call of {} bytes in a capture, where there is staging for {}; call prepare with as many before",
                               bytes, channel.staging ? channel.staging.bytes().size() : 0),
                   site);
    }
    PinnedBuffer larger = METRALE_TRY(PinnedBuffer::create(backend(), round_up(bytes, 4096), site));
    channel.outgrown.reserve(channel.outgrown.size() + 1);
    if (channel.staging) channel.outgrown.push_back(std::move(channel.staging));
    channel.staging = std::move(larger);
    return {};
  }

  Result<> do_trim(Site site) override {
    Result<> first;
    const auto note = [&](Result<> released) {
      if (first && !released) first = std::move(released);
    };
    for (Channel& channel : channels_) {
      if (channel.staging) note(channel.staging.release(site));
      for (PinnedBuffer& buffer : channel.outgrown) note(buffer.release(site));
      std::erase_if(channel.outgrown, [](const PinnedBuffer& buffer) { return !buffer; });
    }
    return first;
  }

  static std::uint64_t staged(std::uint64_t bytes) { return round_up(bytes, kAlignment); }

  Result<> do_prepare(StreamHandle stream, std::uint64_t bytes, Site site) override {
    // Every call's two ends begin on a cache line; a group has a few.
    return grow(channels_[channel_of(stream)], bytes + 64 * kAlignment, site);
  }

  Result<> do_enqueue(std::span<const Collective> calls, StreamHandle stream, Site site) override {
    METRALE_TRY(world_->failure());
    std::uint64_t bytes = 0;
    for (const Collective& call : calls) {
      const CollectiveBytes b = bytes_of(call, rank(), size());
      bytes += staged(b.from) + staged(b.to);
    }
    const std::uint32_t index = channel_of(stream);
    Channel& channel = channels_[index];
    METRALE_TRY(grow(channel, bytes, site));
    std::vector<StagedCall> ready;
    std::byte* at = channel.staging.bytes().data();
    const auto take = [&at](std::uint64_t size) {
      const std::span<std::byte> part(at, size);
      at += staged(size);
      return part;
    };
    for (const Collective& call : calls) {
      const CollectiveBytes b = bytes_of(call, rank(), size());
      const std::span<std::byte> from = take(b.from);
      ready.push_back({call, from, take(b.to)});
    }
    for (const StagedCall& call : ready) {
      if (!call.from.empty()) METRALE_TRY(backend().copy_d2h_async(call.from, call.call.from, stream, site));
    }
    METRALE_TRY(
        backend().enqueue_host(stream, [world = world_, me = rank(), index, ready] { world->run(me, index, ready); }, site));
    for (const StagedCall& call : ready) {
      if (!call.to.empty()) METRALE_TRY(backend().copy_h2d_async_retained(call.call.to, call.to, stream, site));
    }
    return {};
  }

  Result<> do_poll() override { return world_->failure(); }
  void do_abort(std::string_view reason) noexcept override {
    try {
      world_->fail(Error(Errc::invalid_argument, std::string(reason)));
    } catch (...) {
      world_->fail(Error::no_memory());
    }
  }
  // A wait for other ranks ends by itself, in time.
  Result<> do_synchronize(StreamHandle stream, Site site) override { return backend().synchronize(stream, site); }

  std::shared_ptr<World> world_;
  std::vector<Channel> channels_;
};

}  // namespace

Result<std::vector<std::unique_ptr<Communicator>>> create(std::span<GpuBackend* const> backends, const Options& options) {
  if (backends.empty() || backends.size() > kMaxRanks) {
    return Error(Errc::invalid_argument, fmt::format("a world of {} ranks; 1 to {} can be had", backends.size(), kMaxRanks));
  }
  if (options.timeout.count() <= 0)
    return Error(Errc::invalid_argument, fmt::format("a timeout of {} ms; give the ranks time to come", options.timeout.count()));
  for (std::size_t i = 0; i < backends.size(); ++i) {
    const GpuBackend* backend = backends[i];
    if (backend == nullptr) return Error(Errc::invalid_argument, fmt::format("the backend of rank {} is null", i));
    if (std::ranges::find(backends.first(i), backend) != backends.begin() + static_cast<std::ptrdiff_t>(i))
      return Error(Errc::invalid_argument, fmt::format("rank {} has the backend of another rank; each needs its own", i));
    // A driver may run host functions of several streams one after the other on one thread, where the first would wait for ever.
    if (backend->name() != "host" && backend->name() != "mock") {
      return Error(Errc::unsupported, fmt::format("ranks of one process meet on the host and mock backends; the {} backend's host "
                                                  "functions may wait for each other. Take NCCL",
                                                  backend->name()));
    }
    const Capabilities& can = backend->capabilities();
    for (const Capability needed : {Capability::streams, Capability::pinned_memory, Capability::host_callbacks}) {
      if (!can.has(needed))
        return Error(Errc::unsupported, fmt::format("the {} backend lacks {}", backend->name(), to_string(needed)));
    }
  }
  try {
    auto world = std::make_shared<World>(static_cast<std::uint32_t>(backends.size()), options.timeout);
    std::vector<std::unique_ptr<Communicator>> ranks;
    for (std::size_t i = 0; i < backends.size(); ++i)
      ranks.push_back(std::make_unique<Rank>(*backends[i], static_cast<std::uint32_t>(i), world, options.timeout));
    return ranks;
  } catch (const std::bad_alloc&) {
    return Error::no_memory();
  }
}

}  // namespace metrale::in_process
