// SPDX-License-Identifier: Apache-2.0
#include "skeleton_backend.h"

#include <string>
#include <string_view>

namespace skeleton {
namespace {

class SkeletonBackend final : public metrale::GpuBackend {
 public:
  explicit SkeletonBackend(const Options& options) : GpuBackend(options.face) {}
  ~SkeletonBackend() override { shutdown_from_destructor(); }
  using GpuBackend::initialize;

 protected:
  std::string_view do_name() const noexcept override { return "skeleton"; }
  std::string do_device_key() const override { return "skeleton:0"; }
  metrale::Capabilities do_capabilities() const override {
    return metrale::Capabilities::none("the skeleton backend has no device");
  }
};

}  // namespace

metrale::Result<std::unique_ptr<metrale::GpuBackend>> create(Options options) {
  auto backend = std::make_unique<SkeletonBackend>(options);
  METRALE_TRY(backend->initialize());
  return std::unique_ptr<metrale::GpuBackend>(std::move(backend));
}

}  // namespace skeleton
