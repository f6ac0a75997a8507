// SPDX-License-Identifier: Apache-2.0
//
// The host's backend with hooks that a test can take over.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "backends/host/host_backend.h"
#include "two_backends.h"

namespace metrale::test {

class Scripted : public host::HostBackend {
 public:
  using HostBackend::HostBackend;

  static std::unique_ptr<Scripted> make_one(host::Options options = {}, std::string key = {}) {
    options.num_threads = 1;
    auto made = std::make_unique<Scripted>(options);
    made->key = std::move(key);
    if (auto started = made->initialize(); !started) throw std::runtime_error(started.error().to_string());
    return made;
  }

  std::string key;  ///< Device key; empty: one of its own.
  std::function<Result<DevicePtr>(std::uint64_t bytes)> on_alloc;
  std::function<Result<>()> on_free;
  std::function<Result<>()> on_memset;
  std::function<Result<bool>()> on_is_capturing;
  std::function<Result<DeviceMemoryInfo>()> on_memory_info;
  std::function<Result<NativeGraph>(NativeGraph)> on_end_capture;
  std::function<std::vector<DevicePtr>()> graph_addresses;
  std::function<Result<>()> on_unload;
  std::function<Result<>()> on_has_module, on_bind_to_thread;
  std::function<Result<>()> on_host_alias, on_free_pinned, on_unregister;
  std::function<Result<>()> on_record_event, on_destroy_event;
  std::function<Result<>()> on_synchronize, on_destroy_graph;
  std::atomic<int> num_alloc{0}, num_free{0}, num_sync{0}, num_sm_count{0};
  std::atomic<int> num_events{0};  ///< The driver's own that live.
  std::vector<bool> batches_capturing;

 protected:
  std::string do_device_key() const override { return key.empty() ? HostBackend::do_device_key() : key; }
  Result<DevicePtr> do_alloc(std::uint64_t bytes, MemoryKind kind) override {
    ++num_alloc;
    if (on_alloc) {
      auto scripted = on_alloc(bytes);
      if (!scripted || *scripted) return scripted;
    }
    return HostBackend::do_alloc(bytes, kind);
  }
  Result<> do_free(DevicePtr base, std::uint64_t bytes, MemoryKind kind) override {
    ++num_free;
    Result<> scripted = on_free ? on_free() : Result<>();
    METRALE_TRY(HostBackend::do_free(base, bytes, kind));
    return scripted;
  }
  Result<> do_memset(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) override {
    if (on_memset) METRALE_TRY(on_memset());
    return HostBackend::do_memset(dst, value, bytes, stream);
  }
  Result<bool> do_stream_is_capturing(NativeStream stream) override {
    return on_is_capturing ? on_is_capturing() : HostBackend::do_stream_is_capturing(stream);
  }
  Result<DeviceMemoryInfo> do_memory_info() override { return on_memory_info ? on_memory_info() : HostBackend::do_memory_info(); }
  Result<NativeGraph> do_end_capture(NativeStream stream) override {
    auto graph = HostBackend::do_end_capture(stream);
    return graph && on_end_capture ? on_end_capture(*graph) : std::move(graph);
  }
  Result<std::vector<DevicePtr>> do_graph_addresses(NativeGraph) override {
    return graph_addresses ? graph_addresses() : std::vector<DevicePtr>{};
  }
  Result<> do_copy_batch_async(std::span<const CopyDesc> copies, NativeStream stream, bool capturing) override {
    batches_capturing.push_back(capturing);
    return HostBackend::do_copy_batch_async(copies, stream, capturing);
  }
  Result<> do_synchronize(NativeStream stream) override {
    ++num_sync;
    if (on_synchronize) METRALE_TRY(on_synchronize());
    return HostBackend::do_synchronize(stream);
  }
  Result<std::uint32_t> do_sm_count() override {
    ++num_sm_count;
    return HostBackend::do_sm_count();
  }
  Result<DevicePtr> do_host_alias(void* ptr) override {
    if (on_host_alias) METRALE_TRY(on_host_alias());
    return HostBackend::do_host_alias(ptr);
  }
  Result<> do_free_pinned(void* ptr, std::uint64_t bytes) override {
    METRALE_TRY(HostBackend::do_free_pinned(ptr, bytes));
    return on_free_pinned ? on_free_pinned() : Result<>();
  }
  Result<> do_unregister_host(void* ptr, std::uint64_t bytes) override {
    METRALE_TRY(HostBackend::do_unregister_host(ptr, bytes));
    return on_unregister ? on_unregister() : Result<>();
  }
  Result<NativeEvent> do_create_event(bool timed) override {
    ++num_events;
    return HostBackend::do_create_event(timed);
  }
  Result<> do_record_event(NativeEvent event, NativeStream stream) override {
    if (on_record_event) METRALE_TRY(on_record_event());
    return HostBackend::do_record_event(event, stream);
  }
  Result<> do_destroy_event(NativeEvent event) override {
    --num_events;
    METRALE_TRY(HostBackend::do_destroy_event(event));
    return on_destroy_event ? on_destroy_event() : Result<>();
  }
  Result<bool> do_has_module(std::string_view module) override {
    if (on_has_module) METRALE_TRY(on_has_module());
    return HostBackend::do_has_module(module);
  }
  Result<> do_bind_to_thread() override { return on_bind_to_thread ? on_bind_to_thread() : HostBackend::do_bind_to_thread(); }
  Result<> do_destroy_graph(NativeGraph graph) override {
    METRALE_TRY(HostBackend::do_destroy_graph(graph));
    return on_destroy_graph ? on_destroy_graph() : Result<>();
  }
  Result<> do_unload_modules() override { return on_unload ? on_unload() : HostBackend::do_unload_modules(); }
};

}  // namespace metrale::test
