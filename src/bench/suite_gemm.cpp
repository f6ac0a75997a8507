// SPDX-License-Identifier: Apache-2.0
//
// Suite gemm: products through the cuBLASLt bridge, and beside them the library called with what its first heuristic says. Device
// times are those of graphs over weights that together are larger than any cache; the host's share is that of plain calls.
#include <algorithm>
#include <functional>

#include <fmt/format.h>

#include "bench/suites.h"
#include "metrale/bridges/cublaslt.h"
#ifdef METRALE_HAS_CUBLASLT
#include "bridges/cublaslt/plan.h"
#include "bridges/cublaslt/shape.h"
#include "metrale/launch.h"
#include "metrale/op_cache.h"
#endif

namespace metrale::bench {
namespace {

constexpr const char* kNoRows = "products through cuBLASLt";

#ifdef METRALE_HAS_CUBLASLT
using cublaslt::Call;
using cublaslt::CublasLt;
using cublaslt::Options;
using cublaslt::Precision;

constexpr std::uint64_t kWorkspaceBytes = std::uint64_t{32} << 20;
constexpr std::uint64_t kRotatedBytes = std::uint64_t{256} << 20;

/// The library called directly: what its first heuristic says, prepared beforehand.
class RawLibrary {
 public:
  explicit RawLibrary(GpuBackend& backend) : backend_(backend) {}
  RawLibrary(const RawLibrary&) = delete;
  ~RawLibrary() {
    if (handle_ != nullptr && backend_.bind_to_thread()) api_->destroy(handle_);
  }
  Result<> open() {
    const cublaslt::Library* library = METRALE_TRY(cublaslt::Library::load());
    api_ = &library->api;
    METRALE_TRY(backend_.bind_to_thread());
    METRALE_TRY(api_->check(api_->create(&handle_), "cublasLtCreate"));
    workspace_ = METRALE_TRY(DeviceBuffer::create(backend_, kWorkspaceBytes));
    return {};
  }
  Result<cublaslt::Plan> plan(const Call& call) {
    const auto site = std::source_location::current();
    cublaslt::Plan plan;
    METRALE_TRY(cublaslt::describe(*api_, call, call.m, plan, site));
    const auto found = METRALE_TRY(cublaslt::candidates(*api_, handle_, plan, 1, kWorkspaceBytes, false, site));
    if (found.empty()) return Error(Errc::unsupported, "cuBLASLt has no algorithm");
    plan.algorithm = found[0].algo;
    plan.workspace_bytes = kWorkspaceBytes;
    return plan;
  }
  cublasStatus_t run(const cublaslt::Plan& plan, const Call& call, std::uint64_t native) const {
    return cublaslt::launch(*api_, handle_, plan, call, call.m, call.act_scales, workspace_.ptr(), native);
  }
  Result<> enqueue(const cublaslt::Plan& plan, const Call& call, StreamHandle stream) {
    const NativeUse uses[] = {{"workspace", workspace_.ptr(), kWorkspaceBytes}};
    return backend_.enqueue_native("cublasLtMatmul", stream, uses,
                                   [&](std::uint64_t native) { return api_->check(run(plan, call, native), "cublasLtMatmul"); });
  }
  Result<> check(cublasStatus_t status) const { return api_->check(status, "cublasLtMatmul"); }

 private:
  GpuBackend& backend_;
  const cublaslt::Api* api_ = nullptr;
  cublasLtHandle_t handle_ = nullptr;
  DeviceBuffer workspace_;
};

/// Calls of one shape on operands of their own, random.
struct Operands {
  std::vector<DeviceBuffer> memory;
  std::vector<Call> calls;
};

Result<Operands> make_operands(Session& session, const Call& shape) {
  Operands made;
  const cublaslt::Extents e = cublaslt::extents_of(shape);
  const auto count = std::clamp<std::uint64_t>(div_ceil(kRotatedBytes, e.act + e.weight + e.out), 1, 16);
  const auto take = [&](DevicePtr& ptr, std::uint64_t bytes) -> Result<> {
    if (bytes == 0) return {};
    made.memory.push_back(METRALE_TRY(DeviceBuffer::create(session.backend(), round_up(bytes, 256))));
    ptr = made.memory.back().ptr();
    return session.fill(ptr, round_up(bytes, 256), static_cast<std::uint32_t>(made.memory.size()));
  };
  for (std::uint64_t i = 0; i < count; ++i) {
    Call call = shape;
    METRALE_TRY(take(call.act, e.act));
    METRALE_TRY(take(call.weight, e.weight));
    METRALE_TRY(take(call.out, e.out));
    METRALE_TRY(take(call.act_scales, e.act_scales));
    METRALE_TRY(take(call.weight_scales, e.weight_scales));
    made.calls.push_back(call);
  }
  METRALE_TRY(session.backend().synchronize(session.backend().default_stream()));
  return made;
}

using Enqueue = std::function<Result<>(const Call&)>;

/// A graph of `launches` calls over the operands in turn.
Result<Graph> graph_of(GpuBackend& backend, StreamHandle stream, const Operands& operands, std::uint32_t launches,
                       const Enqueue& enqueue) {
  METRALE_TRY(enqueue(operands.calls[0]));
  METRALE_TRY(backend.synchronize(stream));
  CaptureScope capture = METRALE_TRY(CaptureScope::begin(backend, stream));
  for (std::uint32_t i = 0; i < launches; ++i) METRALE_TRY(enqueue(operands.calls[i % operands.calls.size()]));
  return capture.end();
}

Sample graph_time(Session& session, StreamHandle stream, const Graph& graph, std::uint32_t launches) {
  return [&session, stream, &graph, launches]() -> Result<double> {
    return METRALE_TRY(session.device_seconds(stream, [&] { return graph.launch(stream); })) * 1e6 / launches;
  };
}

Call shape_of(std::uint32_t m, std::uint32_t n, std::uint32_t k, Precision precision = Precision::bf16) {
  Call call;
  call.precision = precision;
  call.m = m;
  call.n = n;
  call.k = k;
  return call;
}

std::uint32_t launches_for(const Call& call) {
  const double flops = 2.0 * call.m * call.n * call.k;
  return static_cast<std::uint32_t>(std::clamp(4e-3 / (8e-6 + flops / 6e14), 4.0, 128.0));
}

Result<> measure_host_cost(Session& session, RawLibrary& raw, StreamHandle stream) {
  GpuBackend& backend = session.backend();
  Options options;
  options.measure = false;  // the algorithm of the other side
  options.cache_folder = std::string();
  const auto blas = METRALE_TRY(CublasLt::create(backend, options));
  const Operands operands = METRALE_TRY(make_operands(session, shape_of(16, 256, 256)));
  const Call call = operands.calls[0];
  const cublaslt::Plan plan = METRALE_TRY(raw.plan(call));
  const std::uint64_t native = METRALE_TRY(backend.native_stream(stream));
  const std::uint32_t count = session.scale().launch_batch;
  METRALE_TRY(blas->matmul(call, stream));
  METRALE_TRY(raw.check(raw.run(plan, call, native)));
  const auto per_call = [&](const std::function<Result<>()>& body) -> Result<double> {
    METRALE_TRY(backend.synchronize(stream));
    METRALE_TRY(backend.bind_to_thread());
    const double seconds = METRALE_TRY(host_seconds(body));
    METRALE_TRY(backend.synchronize(stream));
    return seconds * 1e9 / count;
  };
  const Sample ours = [&] {
    return per_call([&]() -> Result<> {
      for (std::uint32_t i = 0; i < count; ++i) METRALE_TRY(blas->matmul(call, stream));
      return {};
    });
  };
  const Sample theirs = [&] {
    return per_call([&]() -> Result<> {
      for (std::uint32_t i = 0; i < count; ++i) {
        if (const cublasStatus_t status = raw.run(plan, call, native); status != CUBLAS_STATUS_SUCCESS) return raw.check(status);
      }
      return {};
    });
  };
  return session.measure({.suite = "gemm",
                          .name = "product with a cached plan, host cost",
                          .unit = "ns",
                          .ours = series("CublasLt::matmul"),
                          .theirs = series("cublasLtMatmul"),
                          .measure = Measure::ratio,
                          .target = {.minimum = 1.05, .goal = 1.02}},
                         ours, theirs);
}

Result<> measure_shape(Session& session, CublasLt& blas, RawLibrary& raw, StreamHandle stream, const Call& shape) {
  GpuBackend& backend = session.backend();
  const Operands operands = METRALE_TRY(make_operands(session, shape));
  const std::uint32_t launches = launches_for(shape);
  const cublaslt::Plan plan = METRALE_TRY(raw.plan(shape));
  METRALE_TRY(blas.prepare(operands.calls[0], stream));
  const Graph ours =
      METRALE_TRY(graph_of(backend, stream, operands, launches, [&](const Call& c) { return blas.matmul(c, stream); }));
  const Graph theirs =
      METRALE_TRY(graph_of(backend, stream, operands, launches, [&](const Call& c) { return raw.enqueue(plan, c, stream); }));
  return session.measure(
      {.suite = "gemm",
       .name = fmt::format("{} rows x {}x{} bf16, {} matrices in turn", shape.m, shape.n, shape.k, operands.calls.size()),
       .unit = "us",
       .ours = series("bridge"),
       .theirs = series("first heuristic"),
       .measure = Measure::ratio,
       .target = {.minimum = 1.01, .goal = 1.01}},
      graph_time(session, stream, ours, launches), graph_time(session, stream, theirs, launches));
}

Result<> measure_fp8(Session& session, CublasLt& blas, StreamHandle stream, const Call& bf16, bool transposed) {
  GpuBackend& backend = session.backend();
  Call block = bf16;
  block.precision = Precision::fp8_block;
  block.scales_transposed = transposed;
  const Operands wide = METRALE_TRY(make_operands(session, bf16));
  const Operands narrow = METRALE_TRY(make_operands(session, block));
  const std::uint32_t launches = launches_for(bf16);
  METRALE_TRY(blas.prepare(wide.calls[0], stream));
  METRALE_TRY(blas.prepare(narrow.calls[0], stream));
  const Enqueue enqueue = [&](const Call& c) { return blas.matmul(c, stream); };
  const Graph ours = METRALE_TRY(graph_of(backend, stream, narrow, launches, enqueue));
  const Graph theirs = METRALE_TRY(graph_of(backend, stream, wide, launches, enqueue));
  return session.measure({.suite = "gemm",
                          .name = fmt::format("{} rows x {}x{}, block-scaled FP8{}", bf16.m, bf16.n, bf16.k,
                                              transposed ? ", scales as the library wants them" : ""),
                          .unit = "us",
                          .ours = series("FP8"),
                          .theirs = series("bf16"),
                          .measure = Measure::speedup,
                          .better = Better::larger,
                          .target = transposed ? Target{} : Target{.minimum = 1.5, .goal = 1.8}},
                         graph_time(session, stream, ours, launches), graph_time(session, stream, theirs, launches));
}

/// Plain calls, queued up behind a kernel that waits, so that the host is ahead.
Result<> measure_two_streams(Session& session, CublasLt& blas, StreamHandle stream, std::uint32_t size) {
  GpuBackend& backend = session.backend();
  constexpr std::uint32_t kPairs = 64;
  constexpr std::uint64_t kHoldNanoseconds = 4'000'000;
  const Operands operands = METRALE_TRY(make_operands(session, shape_of(size, size, size)));
  const Stream other = METRALE_TRY(Stream::create(backend));
  METRALE_TRY(blas.prepare(operands.calls[0], stream));
  METRALE_TRY(blas.prepare(operands.calls[0], other.handle()));
  const KernelHandle hold = METRALE_TRY(backend.kernel(kBenchModule, "hold"));
  const Event start = METRALE_TRY(Event::create_timed(backend));
  const Event end = METRALE_TRY(Event::create_timed(backend));
  const Event joined = METRALE_TRY(Event::create(backend));
  const auto pairs = [&](bool two) -> Result<double> {
    METRALE_TRY(Launch(backend, hold).arg_u64(kHoldNanoseconds).launch(stream));
    METRALE_TRY(start.record(stream));
    METRALE_TRY(start.hold(other.handle()));
    const std::size_t half = operands.calls.size() / 2;
    for (std::uint32_t i = 0; i < kPairs; ++i) {
      METRALE_TRY(blas.matmul(operands.calls[i % half], stream));
      METRALE_TRY(blas.matmul(operands.calls[half + i % half], two ? other.handle() : stream));
    }
    METRALE_TRY(joined.record(other.handle()));
    METRALE_TRY(joined.hold(stream));
    METRALE_TRY(end.record(stream));
    METRALE_TRY(end.synchronize());
    return static_cast<double>(METRALE_TRY(end.elapsed_ns_since(start))) / 1e3 / kPairs;
  };
  METRALE_TRY(session.measure(
      {.suite = "gemm",
       .name = fmt::format("two products of {}^3 on two streams", size),
       .unit = "us",
       .ours = series("two streams"),
       .theirs = series("one stream"),
       .measure = Measure::speedup,
       .better = Better::larger,
       .target = {.minimum = 1.2, .goal = 1.6}},
      [&] { return pairs(true); }, [&] { return pairs(false); }));
  return backend.op_cache().retire_stream(other.handle());
}

Result<> run_on_device(Session& session) {
  GpuBackend& backend = session.backend();
  RawLibrary raw(backend);
  METRALE_TRY(raw.open());
  Options options;
  options.cache_folder = std::string();
  const auto blas = METRALE_TRY(CublasLt::create(backend, options));
  const Stream stream = METRALE_TRY(Stream::create(backend));
  METRALE_TRY(measure_host_cost(session, raw, stream.handle()));
  if (session.scale().large_models) {
    METRALE_TRY(measure_shape(session, *blas, raw, stream.handle(), shape_of(8'192, 8'192, 8'192)));
    for (const std::uint32_t m : {1U, 16U, 64U, 256U, 2'048U}) {
      METRALE_TRY(measure_shape(session, *blas, raw, stream.handle(), shape_of(m, 4'096, 4'096)));
    }
    METRALE_TRY(measure_fp8(session, *blas, stream.handle(), shape_of(2'048, 4'096, 4'096), false));
    METRALE_TRY(measure_fp8(session, *blas, stream.handle(), shape_of(2'048, 4'096, 4'096), true));
  }
  METRALE_TRY(measure_two_streams(session, *blas, stream.handle(), 1'024));
  METRALE_TRY(stream.synchronize());
  return backend.op_cache().retire_stream(stream.handle());
}
#endif

}  // namespace

Result<> run_gemm(Session& session, const bench::Options&) {
  const BridgeStatus status = cublaslt::status();
#ifdef METRALE_HAS_CUBLASLT
  if (status.is_available && session.backend().name() == "cuda") return run_on_device(session);
#endif
  session.report().rows.push_back(
      {.suite = "gemm",
       .name = kNoRows,
       .note = session.backend().name() == "cuda" ? status.text : "cuBLASLt works on the CUDA backend alone"});
  return {};
}

}  // namespace metrale::bench
