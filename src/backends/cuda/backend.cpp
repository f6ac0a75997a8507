// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <utility>

#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/driver_log.h"

namespace metrale::cuda {

namespace {

/// Keeps an object for ever: its end would touch the driver or a lock that another process's thread holds.
template <class T>
void abandon(T& object) {
  static_cast<void>(new T(std::move(object)));
}

}  // namespace

CudaBackend::CudaBackend(std::shared_ptr<Context> context, const FaceOptions& face)
    : GpuBackend(face),
      context_(std::move(context)),
      driver_(context_->driver()),
      modules_(driver_, context_->device()),
      pinned_(std::make_shared<PinnedPool>(driver_)),
      host_calls_(std::make_shared<HostCalls>()) {}

CudaBackend::~CudaBackend() {
  if (in_forked_child()) {
    modules_.forget();
    abandon(partings_);
    abandon(host_calls_);
    abandon(pinned_);
    abandon(context_);
    return;
  }
  // Static objects may be destroyed after the driver, which took all it knew along.
  CUcontext current = nullptr;
  if (!is_gone(driver_.cuCtxGetCurrent_(&current))) shutdown_from_destructor();
  // Where the driver has gone, the backend was never made whole, or its shutdown failed.
  do_shutdown();
}

Result<> CudaBackend::start(const Options& options) {
  METRALE_TRY(context_->make_current());
  CUuuid uuid{};
  METRALE_TRY(check(driver_.cuDeviceGetUuid_(&uuid, context_->device()), "cuDeviceGetUuid"));
  device_key_ = "cuda:" + uuid_text(uuid);
  METRALE_TRY(check(driver_.cuCtxGetStreamPriorityRange_(&least_priority_, &greatest_priority_), "cuCtxGetStreamPriorityRange"));
  is_integrated_ = context_->attribute(CU_DEVICE_ATTRIBUTE_INTEGRATED) == 1;
  METRALE_TRY(noted(modules_.load(options.modules, options.warm)));
  return initialize();
}

Capabilities CudaBackend::do_capabilities() const {
  Capabilities all;
  for (std::size_t i = 0; i < kNumCapabilities; ++i) all.add(static_cast<Capability>(i));
  const int major = context_->attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  const int minor = context_->attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  const auto need = [&](Capability capability, bool is_there, std::string_view what) {
    if (!is_there) all.lacks(capability, fmt::format("this device (compute capability {}.{}) has no {}", major, minor, what));
  };
  need(Capability::managed_memory, context_->attribute(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY) != 0, "managed memory");
  need(Capability::host_registration, context_->attribute(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED) != 0,
       "registration of host memory");
  need(Capability::host_alias, context_->attribute(CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY) != 0, "mapped host memory");
  need(Capability::stream_priorities,
       context_->attribute(CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED) != 0 && least_priority_ != greatest_priority_,
       "stream priorities");
  need(Capability::cooperative_launch, context_->attribute(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH) != 0, "cooperative launch");
  need(Capability::cluster_launch, context_->attribute(CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH) != 0, "clusters");
  need(Capability::dependent_launch, major >= 9, "programmatic dependent launch, which begins with 9.0");
  need(Capability::tensor_maps, major >= 9 && driver_.cuTensorMapEncodeTiled_ != nullptr, "tensor maps, which begin with 9.0");
  return all;
}

Result<std::uint32_t> CudaBackend::do_sm_count() {
  int count = 0;
  METRALE_TRY(check(driver_.cuDeviceGetAttribute_(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, context_->device()),
                    "cuDeviceGetAttribute"));
  return static_cast<std::uint32_t>(count);
}

void CudaBackend::do_shutdown() noexcept {
  if (is_closed_) return;
  is_closed_ = true;
  const OutsideCapture outside(driver_);
  const bool driver_works = !context_->is_lost() && (context_->make_current().has_value() || context_->make_current().has_value());
  if (driver_works) {
    reap_all();
    static_cast<void>(modules_.unload().has_value());
  } else {
    modules_.forget();
    partings_.clear();
  }
  pinned_->close(driver_works);
  host_calls_->clear();
  kernels_.clear();
  graphs_.clear();
  context_->work().forget(this);
}

Result<std::unique_ptr<GpuBackend>> create_with_driver(const Driver& driver, const Options& options) {
  try {
    METRALE_TRY(check(driver, driver.cuInit_(0), "cuInit"));
    listen_to_log(driver);
    // The thread may hold a capture of another backend, which loading modules would break.
    const OutsideCapture outside(driver);
    auto backend = std::make_unique<CudaBackend>(METRALE_TRY(Context::of_device(driver, options.ordinal)), options.face);
    METRALE_TRY(backend->start(options));
    return std::unique_ptr<GpuBackend>(std::move(backend));
  } catch (const std::exception& error) {
    return Error(Errc::out_of_memory, fmt::format("create a CUDA backend: {}", error.what()));
  }
}

Result<std::unique_ptr<GpuBackend>> create(const Options& options) {
  const Driver* driver = METRALE_TRY(load_driver());
  return create_with_driver(*driver, options);
}

std::optional<std::string> unavailable() {
  const Result<const Driver*> driver = load_driver();
  if (driver) return std::nullopt;
  return driver.error().message();
}

}  // namespace metrale::cuda
