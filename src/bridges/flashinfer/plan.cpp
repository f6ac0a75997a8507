// SPDX-License-Identifier: Apache-2.0
//
// Planning and running attention.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "bridges/flashinfer/bridge.h"
#include "bridges/flashinfer/tables.h"
#include "metrale/device_buffer.h"
#include "metrale/event.h"
#include "metrale/op_cache.h"
#include "metrale/owner_scope.h"
#include "metrale/pinned_buffer.h"

namespace metrale::flashinfer {
namespace {

constexpr std::string_view kPartialsTag = "flashinfer.partials";
/// Fewer queries than this for each sequence leave most of a wgmma tile of 128 empty: query heads are not packed into it.
constexpr std::uint32_t kLeastHopperQueries = 64;

Result<> unsupported(const AttentionShape& shape, Kernel kernel, std::string_view why, std::source_location site) {
  return Error(Errc::unsupported,
               fmt::format("flashinfer: {} for {} query and {} key heads of {}, window {}, cap {}: {}", to_string(kernel),
                           shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.window, shape.soft_cap, why),
               site);
}

bool serves(fi::Variant have, const AttentionShape& shape) noexcept {
  if (shape.soft_cap > 0) return have == fi::Variant::window_and_cap;
  return have == fi::Variant::window || (have == fi::Variant::plain && shape.window == 0);
}

class PlanOf final : public AttentionPlan {
 public:
  PlanOf(GpuBackend& backend, const fi::Device& device, const AttentionShape& shape, const PlanOptions& options)
      : backend_(&backend), device_(device), shape_(shape), options_(options) {
    if (shape_.scale == 0) shape_.scale = 1 / std::sqrt(static_cast<float>(shape_.head_dim));
    if (under_graph() && options_.max_rows == 0) options_.max_rows = options_.max_batch;
  }

  Result<> find_instances(std::source_location site);

  Result<> plan(std::span<const Sequence> sequences, StreamHandle stream, std::source_location site) override;
  Result<> run(const PagedCall& call, StreamHandle stream, std::source_location site) override;
  Result<> run(const PackedCall& call, StreamHandle stream, std::source_location site) override;
  Result<> append(const AppendCall& call, StreamHandle stream, std::source_location site) override;

  const AttentionShape& shape() const noexcept override { return shape_; }
  const PlanOptions& options() const noexcept override { return options_; }
  Extent extent() const noexcept override { return planned_ ? extent_ : Extent(); }
  Kernel kernel() const noexcept override { return planned_ ? kernel_ : Kernel::automatic; }
  std::uint64_t num_schedules() const noexcept override { return num_schedules_; }
  std::uint64_t num_uploads() const noexcept override { return num_uploads_; }
  std::uint64_t size_bytes() const noexcept override;

  std::string_view label() const noexcept override { return "flashinfer plan"; }
  Result<> release(GpuBackend& backend) override;

 private:
  /// Tables that a copy to the device may still read.
  struct Slot {
    PinnedBuffer memory;
    Event uploaded;
    bool in_use = false;
  };

  bool under_graph() const noexcept { return options_.max_batch > 0; }
  bool packed() const noexcept { return options_.page_size == 0; }
  std::uint32_t page_size() const noexcept { return std::max(options_.page_size, 1U); }
  std::uint32_t group() const noexcept { return shape_.num_q_heads / shape_.num_kv_heads; }
  std::int32_t window_left() const noexcept { return shape_.window == 0 ? -1 : static_cast<std::int32_t>(shape_.window) - 1; }
  Result<Kernel> choose(const Tables& tables, const Extent& extent, std::source_location site) const;
  Result<> hold(const Capacity& capacity, std::source_location site);
  Result<> schedule(Slot& slot, StreamHandle stream, std::source_location site);
  Result<> check_capture(StreamHandle stream, std::source_location site) const;
  fi::Pages pages(const KvPages& kv) const noexcept;
  Result<> enqueue(fi::RunArgs& args, std::array<NativeUse, 7>& uses, std::size_t num_uses, DevicePtr lse, StreamHandle stream,
                   std::source_location site);
  template <class T>
  T* on_device(std::uint64_t offset) const noexcept {
    return host_view<T>(memory_.ptr().offset(offset));
  }

  GpuBackend* backend_;
  fi::Device device_;
  AttentionShape shape_;
  PlanOptions options_;
  const fi::DecodeInstance* decode_ = nullptr;
  const fi::PrefillInstance* tensor_cores_ = nullptr;
  const fi::PrefillInstance* hopper_ = nullptr;

  Capacity capacity_;
  Layout layout_;
  DeviceBuffer memory_;
  std::array<Slot, 2> slots_;
  std::size_t next_slot_ = 0;
  std::vector<DeviceBuffer> outgrown_;  // what graphs name yet

  bool planned_ = false;
  Tables tables_;
  Tables next_;
  Extent extent_;
  Kernel kernel_ = Kernel::automatic;
  StreamHandle stream_;
  fi::Planned schedule_;
  bool has_schedule_ = false;
  std::uint64_t num_schedules_ = 0;
  std::uint64_t num_uploads_ = 0;
};

Result<> PlanOf::find_instances(std::source_location site) {
  const std::uint32_t dim = shape_.head_dim;
  for (const fi::DecodeInstance* instance : fi::decode_instances()) {
    if (decode_ == nullptr && instance->head_dim == dim && serves(instance->variant, shape_)) decode_ = instance;
  }
  for (const fi::PrefillInstance* instance : fi::prefill_instances()) {
    if (instance->head_dim != dim || instance->causal != shape_.causal || !serves(instance->variant, shape_)) continue;
    if (!instance->hopper && tensor_cores_ == nullptr) tensor_cores_ = instance;
    if (instance->hopper && instance->packed == packed() && hopper_ == nullptr && device_.major == 9) hopper_ = instance;
  }
  const bool group_of_decode = group() <= 4 || group() == 8;
  if (!group_of_decode || packed()) decode_ = nullptr;
  const Kernel kernel = options_.kernel;
  if (decode_ == nullptr && tensor_cores_ == nullptr) {
    return unsupported(shape_, kernel, "heads of that size were not compiled; see METRALE_FLASHINFER_HEAD_DIMS", site);
  }
  if (kernel == Kernel::cuda_cores && decode_ == nullptr) {
    return unsupported(shape_, kernel, "1, 2, 3, 4 or 8 query heads to a key head are possible", site);
  }
  if (kernel == Kernel::hopper && hopper_ == nullptr) {
    return unsupported(shape_, kernel,
                       device_.major == 9 ? "not compiled; see METRALE_FLASHINFER_HOPPER_VARIANTS and METRALE_CUTLASS_ROOT"
                                          : "the device is not of compute capability 9.0",
                       site);
  }
  return {};
}

Result<Kernel> PlanOf::choose(const Tables& tables, const Extent& extent, std::source_location site) const {
  if (options_.kernel != Kernel::automatic) return options_.kernel;
  const bool one_each = tables.batch() == extent.rows;
  // Groups of heads share what tensor cores have read once; alone they gain nothing by them.
  if (one_each && decode_ != nullptr && (group() == 1 || tensor_cores_ == nullptr)) return Kernel::cuda_cores;
  if (hopper_ != nullptr && extent.rows / tables.batch() >= kLeastHopperQueries) return Kernel::hopper;
  if (tensor_cores_ != nullptr) return Kernel::tensor_cores;
  METRALE_TRY(unsupported(shape_, options_.kernel, "no kernel of this build does it", site));
  return Kernel::automatic;
}

Result<> PlanOf::hold(const Capacity& capacity, std::source_location site) {
  // Graphs that named an outgrown block may be gone by now; if not, it waits on.
  std::erase_if(outgrown_, [](DeviceBuffer& block) { return block.release().has_value(); });
  if (memory_ && capacity_.holds(capacity)) return {};
  Capacity grown = capacity;
  if (!under_graph()) {
    const auto more = [](auto had, auto wanted) { return std::max(had, static_cast<decltype(had)>(wanted + wanted / 4)); };
    grown = {.batch = more(capacity_.batch, capacity.batch),
             .rows = more(capacity_.rows, capacity.rows),
             .pages = more(capacity_.pages, capacity.pages),
             .schedule_bytes = more(capacity_.schedule_bytes, capacity.schedule_bytes)};
  }
  const Layout layout(grown);
  const OwnerScope owner(label());
  std::array<Slot, 2> slots;
  for (Slot& slot : slots) {
    slot.memory = METRALE_TRY(PinnedBuffer::create(*backend_, layout.bytes, site));
    slot.uploaded = METRALE_TRY(Event::create(*backend_, site));
  }
  DeviceBuffer memory = METRALE_TRY(DeviceBuffer::create(*backend_, layout.bytes, site));
  if (memory_) outgrown_.push_back(std::move(memory_));
  std::erase_if(outgrown_, [](DeviceBuffer& block) { return block.release().has_value(); });
  memory_ = std::move(memory);
  slots_ = std::move(slots);
  capacity_ = grown;
  layout_ = layout;
  has_schedule_ = false;
  return {};
}

Result<> PlanOf::check_capture(StreamHandle stream, std::source_location site) const {
  if (under_graph() || !backend_->stream_is_capturing(stream, site)) return {};
  return Error(Errc::capture_unsafe, "flashinfer: runs of this plan cannot be captured: give max_batch in its options", site);
}

Result<> PlanOf::schedule(Slot& slot, StreamHandle stream, std::source_location site) {
  has_schedule_ = false;
  fi::Planned planned;
  fi::PlanArgs args{.q_indptr = next_.q_indptr.data(),
                    .kv_indptr = next_.page_indptr.data(),
                    .kv_len = next_.kv_len.data(),
                    .batch = next_.batch(),
                    .rows = extent_.rows,
                    .num_q_heads = shape_.num_q_heads,
                    .num_kv_heads = shape_.num_kv_heads,
                    .head_dim = shape_.head_dim,
                    .page_size = page_size(),
                    .window_left = window_left(),
                    .causal = shape_.causal,
                    .under_graph = under_graph(),
                    .ints_device = on_device<void>(layout_.schedule),
                    .ints_host = slot.memory.bytes().data() + layout_.schedule,
                    .ints_bytes = capacity_.schedule_bytes,
                    .stream = 0};
  const auto work = [&](std::uint64_t native) {
    args.stream = native;
    const auto make = kernel_ == Kernel::cuda_cores ? decode_->plan
                      : kernel_ == Kernel::hopper   ? fi::plan_hopper
                                                    : fi::plan_prefill;
    return translate(make(args, planned), "planning", site);
  };
  const std::array<NativeUse, 1> uses{{{"plan", memory_.ptr(), layout_.bytes}}};
  METRALE_TRY(backend_->enqueue_native("flashinfer.plan", stream, uses, work, site));
  if (under_graph() && !schedule_.info.empty() && schedule_.info != planned.info) {
    return Error(Errc::internal, "flashinfer: a plan for graphs came out with another layout than the one before", site);
  }
  schedule_ = std::move(planned);
  has_schedule_ = true;
  ++num_schedules_;
  return {};
}

Result<> PlanOf::plan(std::span<const Sequence> sequences, StreamHandle stream, std::source_location site) {
  METRALE_TRY(check(shape_, options_, sequences, site));
  if (backend_->stream_is_capturing(stream, site)) {
    return Error(Errc::capture_unsafe, "flashinfer: planning is not captured: plan before, and replay after it", site);
  }
  const bool was_planned = std::exchange(planned_, false);
  Extent extent;
  fill(shape_, options_, sequences, next_, extent);
  const bool same_stream = was_planned && stream_ == stream;
  if (same_stream && next_ == tables_) {
    planned_ = true;
    return {};
  }
  const Kernel kernel = METRALE_TRY(choose(next_, extent, site));
  METRALE_TRY(hold(capacity_for(shape_, options_, next_, extent, kernel, static_cast<std::uint32_t>(device_.num_sms)), site));
  const bool keeps_schedule = same_stream && has_schedule_ && kernel == kernel_ && next_.q_indptr == tables_.q_indptr &&
                              next_.page_indptr == tables_.page_indptr &&
                              (kernel != Kernel::hopper || next_.kv_len == tables_.kv_len);
  extent_ = extent;
  kernel_ = kernel;

  Slot& slot = slots_[next_slot_];
  next_slot_ = (next_slot_ + 1) % slots_.size();
  if (std::exchange(slot.in_use, false)) METRALE_TRY(slot.uploaded.synchronize(site));
  const auto put = [&](std::uint64_t offset, const std::vector<std::int32_t>& table) {
    if (!table.empty()) std::memcpy(slot.memory.bytes().data() + offset, table.data(), table.size() * sizeof(std::int32_t));
  };
  put(layout_.q_indptr, next_.q_indptr);
  put(layout_.page_indptr, next_.page_indptr);
  put(layout_.last_page_len, next_.last_page_len);
  put(layout_.batch_indices, next_.batch_indices);
  put(layout_.positions, next_.positions);
  put(layout_.indices, next_.indices);

  slot.in_use = true;  // also after a failure: a copy may be under way
  const auto recorded = [&]() -> Result<> { return slot.uploaded.record(stream, site); };
  if (!keeps_schedule) {
    if (Result<> made = schedule(slot, stream, site); !made) {
      (void)recorded().has_value();
      return std::move(made).error();
    }
  }
  METRALE_TRY(backend_->copy_h2d_async_retained(
      memory_.ptr(), slot.memory.bytes().first(layout_.indices + next_.indices.size() * sizeof(std::int32_t)), stream, site));
  METRALE_TRY(recorded());
  if (schedule_.partials_bytes > 0) {
    METRALE_TRY(backend_->op_cache().scratch(kPartialsTag, stream, schedule_.partials_bytes, site));
  }
  std::swap(tables_, next_);
  stream_ = stream;
  planned_ = true;
  ++num_uploads_;
  return {};
}

fi::Pages PlanOf::pages(const KvPages& kv) const noexcept {
  return {.k = host_view<void>(kv.k),
          .v = host_view<void>(kv.v),
          .page_stride = kv.page_stride,
          .token_stride = kv.token_stride,
          .head_stride = kv.head_stride,
          .page_size = kv.page_size,
          .num_heads = kv.num_heads,
          .head_dim = kv.head_dim,
          .indices = on_device<std::int32_t>(layout_.indices),
          .indptr = on_device<std::int32_t>(layout_.page_indptr),
          .last_page_len = on_device<std::int32_t>(layout_.last_page_len)};
}

std::uint64_t pages_bytes(const KvPages& kv) noexcept {
  return 2 * ((kv.num_pages - 1) * kv.page_stride + (kv.page_size - 1) * kv.token_stride + (kv.num_heads - 1) * kv.head_stride +
              kv.head_dim);
}

Result<> PlanOf::enqueue(fi::RunArgs& args, std::array<NativeUse, 7>& uses, std::size_t num_uses, DevicePtr lse,
                         StreamHandle stream, std::source_location site) {
  METRALE_TRY(check_capture(stream, site));
  const std::uint64_t row = std::uint64_t{shape_.num_q_heads} * shape_.head_dim;
  if (args.q_stride == 0) args.q_stride = row;
  args.lse = host_view<float>(lse);
  args.rows = extent_.rows;
  args.num_q_heads = shape_.num_q_heads;
  args.packed_rows = extent_.kv_rows;
  args.q_indptr = on_device<std::int32_t>(layout_.q_indptr);
  args.batch = tables_.batch();
  args.window_left = window_left();
  args.soft_cap = shape_.soft_cap;
  args.scale = shape_.scale;
  args.causal = shape_.causal;
  args.info = &schedule_.info;
  args.ints_device = on_device<void>(layout_.schedule);
  const auto use = [&](std::string_view what, DevicePtr ptr, std::uint64_t bytes) { uses[num_uses++] = {what, ptr, bytes}; };
  if (lse) use("lse", lse, std::uint64_t{extent_.rows} * shape_.num_q_heads * sizeof(float));
  use("plan", memory_.ptr(), layout_.bytes);
  if (schedule_.partials_bytes > 0) {
    const DevicePtr partials = METRALE_TRY(backend_->op_cache().scratch(kPartialsTag, stream, schedule_.partials_bytes, site));
    args.partials = host_view<void>(partials);
    use("partial results", partials, schedule_.partials_bytes);
  }
  const auto work = [&](std::uint64_t native) {
    args.stream = native;
    const auto kernel = kernel_ == Kernel::cuda_cores ? decode_->run
                        : kernel_ == Kernel::hopper   ? hopper_->run
                                                      : tensor_cores_->run;
    return translate(kernel(args), to_string(kernel_), site);
  };
  return backend_->enqueue_native("flashinfer.attention", stream, {uses.data(), num_uses}, work, site);
}

Result<> PlanOf::run(const PagedCall& call, StreamHandle stream, std::source_location site) {
  METRALE_TRY(check(shape_, options_, extent(), call, site));
  const std::uint64_t row = std::uint64_t{shape_.num_q_heads} * shape_.head_dim;
  fi::RunArgs args{.q = host_view<void>(call.q), .out = host_view<void>(call.out), .q_stride = call.q_stride, .kv = pages(call.kv)};
  const std::uint64_t q_stride = call.q_stride == 0 ? row : call.q_stride;
  std::array<NativeUse, 7> uses{{{"q", call.q, ((extent_.rows - 1) * q_stride + row) * 2},
                                 {"out", call.out, extent_.rows * row * 2},
                                 {"k", call.kv.k, pages_bytes(call.kv)},
                                 {"v", call.kv.v, pages_bytes(call.kv)}}};
  return enqueue(args, uses, 4, call.lse, stream, site);
}

Result<> PlanOf::run(const PackedCall& call, StreamHandle stream, std::source_location site) {
  METRALE_TRY(check(shape_, options_, extent(), call, site));
  const std::uint64_t row = std::uint64_t{shape_.num_q_heads} * shape_.head_dim;
  const std::uint64_t kv_row = std::uint64_t{shape_.num_kv_heads} * shape_.head_dim;
  const std::uint64_t q_stride = call.q_stride == 0 ? row : call.q_stride;
  const std::uint64_t kv_stride = call.kv_stride == 0 ? kv_row : call.kv_stride;
  const std::uint64_t kv_bytes = ((extent_.kv_rows - 1) * kv_stride + kv_row) * 2;
  KvPages rows{.k = call.k,
               .v = call.v,
               .num_pages = static_cast<std::uint32_t>(extent_.kv_rows),
               .page_size = 1,
               .num_heads = shape_.num_kv_heads,
               .head_dim = shape_.head_dim,
               .dtype = shape_.dtype,
               .page_stride = kv_stride,
               .token_stride = kv_stride,
               .head_stride = shape_.head_dim};
  fi::RunArgs args{.q = host_view<void>(call.q), .out = host_view<void>(call.out), .q_stride = call.q_stride, .kv = pages(rows)};
  std::array<NativeUse, 7> uses{{{"q", call.q, ((extent_.rows - 1) * q_stride + row) * 2},
                                 {"out", call.out, extent_.rows * row * 2},
                                 {"k", call.k, kv_bytes},
                                 {"v", call.v, kv_bytes}}};
  return enqueue(args, uses, 4, call.lse, stream, site);
}

Result<> PlanOf::append(const AppendCall& call, StreamHandle stream, std::source_location site) {
  METRALE_TRY(check(shape_, options_, extent(), call, site));
  METRALE_TRY(check_capture(stream, site));
  const std::uint64_t row = std::uint64_t{shape_.num_kv_heads} * shape_.head_dim;
  const std::uint64_t stride = call.row_stride == 0 ? row : call.row_stride;
  const std::uint64_t bytes = ((extent_.rows - 1) * stride + row) * 2;
  const std::array<NativeUse, 5> uses{{{"new k", call.k, bytes},
                                       {"new v", call.v, bytes},
                                       {"k", call.kv.k, pages_bytes(call.kv)},
                                       {"v", call.kv.v, pages_bytes(call.kv)},
                                       {"plan", memory_.ptr(), layout_.bytes}}};
  const auto work = [&](std::uint64_t native) {
    return translate(fi::append({.k = host_view<void>(call.k),
                                 .v = host_view<void>(call.v),
                                 .row_stride = stride,
                                 .rows = extent_.rows,
                                 .batch = tables_.batch(),
                                 .kv = pages(call.kv),
                                 .batch_indices = on_device<std::int32_t>(layout_.batch_indices),
                                 .positions = on_device<std::int32_t>(layout_.positions),
                                 .stream = native}),
                     "append", site);
  };
  return backend_->enqueue_native("flashinfer.append", stream, uses, work, site);
}

std::uint64_t PlanOf::size_bytes() const noexcept {
  std::uint64_t bytes = memory_.size_bytes();
  for (const DeviceBuffer& block : outgrown_) bytes += block.size_bytes();
  return bytes;
}

Result<> PlanOf::release(GpuBackend& backend) {
  if (&backend != backend_) return Error(Errc::invalid_argument, "flashinfer: the plan was made on another backend");
  planned_ = has_schedule_ = false;
  schedule_ = {};
  Result<> first;
  const auto note = [&](Result<> released) {
    if (first && !released) first = std::move(released);
  };
  if (memory_) note(memory_.release());
  for (DeviceBuffer& block : outgrown_) note(block.release());
  std::erase_if(outgrown_, [](const DeviceBuffer& block) { return !block; });
  for (Slot& slot : slots_) {
    note(slot.memory.release());
    slot.uploaded = {};
    slot.in_use = false;
  }
  if (!memory_) {
    capacity_ = {};
    layout_ = Layout();
  }
  return first;
}

}  // namespace

Result<std::unique_ptr<AttentionPlan>> make_attention_plan(GpuBackend& backend, const fi::Device& device,
                                                           const AttentionShape& shape, const PlanOptions& options,
                                                           std::source_location site) {
  auto plan = std::make_unique<PlanOf>(backend, device, shape, options);
  METRALE_TRY(plan->find_instances(site));
  return std::unique_ptr<AttentionPlan>(std::move(plan));
}

}  // namespace metrale::flashinfer
