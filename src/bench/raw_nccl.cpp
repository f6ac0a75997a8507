// SPDX-License-Identifier: Apache-2.0
#include "bench/raw_nccl.h"

#include <string>
#include <string_view>
#include <thread>

#include <fmt/format.h>

#include "core/shared_library.h"

namespace metrale::bench {
namespace {

// Of nccl.h, so that a build needs it only for the bridge.
constexpr int kFloat32 = 7;
constexpr int kSum = 0;

constexpr const char* kNames[] = {"libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2", "/usr/lib/x86_64-linux-gnu/libnccl.so.2",
                                  "libnccl.so"};

Result<> check(int code, std::string_view what) {
  if (code == 0) return {};
  return Error(Errc::internal, fmt::format("{} answers {}", what, code)).with_native(code, "ncclResult_t");
}

}  // namespace

struct RawNccl::Api {
  int (*init_all)(void**, int, const int*) = nullptr;
  int (*all_reduce)(const void*, void*, std::size_t, int, int, void*, void*) = nullptr;
  int (*destroy)(void*) = nullptr;
};

RawNccl::RawNccl() : api_(std::make_unique<Api>()) {}

Result<std::unique_ptr<RawNccl>> RawNccl::create(std::span<const int> devices) {
  const detail::SharedLibrary library = METRALE_TRY(detail::SharedLibrary::open("NCCL", kNames));
  std::unique_ptr<RawNccl> raw(new RawNccl());
  std::string missing;
  library.find("ncclCommInitAll", raw->api_->init_all, missing);
  library.find("ncclAllReduce", raw->api_->all_reduce, missing);
  library.find("ncclCommDestroy", raw->api_->destroy, missing);
  if (!missing.empty()) return Error(Errc::unsupported, "NCCL lacks " + missing);
  std::vector<void*> comms(devices.size(), nullptr);
  METRALE_TRY(check(raw->api_->init_all(comms.data(), static_cast<int>(devices.size()), devices.data()), "ncclCommInitAll"));
  raw->comms_ = std::move(comms);
  return raw;
}

RawNccl::~RawNccl() {
  std::vector<std::thread> threads;
  for (void* comm : comms_) threads.emplace_back([this, comm] { static_cast<void>(api_->destroy(comm)); });
  for (std::thread& thread : threads) thread.join();
}

Result<> RawNccl::all_reduce(std::uint32_t rank, DevicePtr from, DevicePtr to, std::uint64_t count,
                             std::uint64_t native_stream) const {
  return check(api_->all_reduce(reinterpret_cast<const void*>(from.address), reinterpret_cast<void*>(to.address), count, kFloat32,
                                kSum, comms_[rank], reinterpret_cast<void*>(native_stream)),
               "ncclAllReduce");
}

}  // namespace metrale::bench
