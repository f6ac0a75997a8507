// SPDX-License-Identifier: Apache-2.0
//
// The CUDA kernels of module "decoder" by themselves: right on ragged shapes (cuda_decoder_cases.h), and how long they take in a
// graph of launches, as a decode step makes them. Needs a GPU and nothing of the library:
//   nvcc -std=c++20 -O2 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -cudart static -Iinclude -Ikernels/cuda
//     -Ikernels/cuda/include benchmarks/kernels/cuda_decoder_bench.cu -o cuda_decoder_bench
//   cuda_decoder_bench [check|time] [part of the names to time]
// Exit status 1: a result was wrong.
#include <unistd.h>

#include <algorithm>
#include <functional>

#include "cuda_decoder_cases.h"

namespace bench {
namespace {

namespace decoder = metrale::cuda::decoder;

__global__ void fill(float* x, std::size_t n, float scale) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n; i += std::size_t{gridDim.x} * blockDim.x) {
    const auto bits = static_cast<std::uint32_t>((i + 1) * 2654435761U);
    x[i] = (static_cast<float>(bits >> 8) * 0x1p-23F - 1) * scale;
  }
}
__global__ void fill_bf16(std::uint16_t* x, std::size_t n) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n; i += std::size_t{gridDim.x} * blockDim.x)
    x[i] = decoder::to_bf16(static_cast<float>((i * 2654435761U) >> 16 & 255U) * 0x1p-7F - 1);
}
__global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}
__global__ void nothing() {
  metrale::let_dependents_start();
  metrale::wait_for_predecessor();
}

Dev<float> filled(std::size_t n, float scale = 1) {
  Dev<float> x(n);
  fill<<<512, 256>>>(x.ptr(), n, scale);
  return x;
}

/// Microseconds of one of `count` launches in a graph, the best of a few replays.
double time_launches(Launcher& run, int count, bool dependent, const std::function<void(int)>& launch) {
  Launcher& r = run;
  CHECK_CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
  r.dependent = dependent;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  CHECK_CUDA(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < count; ++i) launch(i);
  CHECK_CUDA(cudaStreamEndCapture(r.stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 7; ++i) {
    CHECK_CUDA(cudaEventRecord(begin, r.stream));
    CHECK_CUDA(cudaGraphLaunch(exec, r.stream));
    CHECK_CUDA(cudaEventRecord(end, r.stream));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  CHECK_CUDA(cudaEventDestroy(begin));
  CHECK_CUDA(cudaEventDestroy(end));
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(r.stream));
  r.stream = nullptr;
  r.dependent = false;
  return static_cast<double>(times[times.size() / 2]) * 1000 / count;
}

std::string& wanted() {
  static std::string part;
  return part;
}

/// `bytes` and `flops` of one launch; 0 where they say nothing.
void report(Launcher& run, const char* name, double bytes, double flops, int count, const std::function<void(int)>& launch) {
  if (std::string(name).find(wanted()) == std::string::npos) return;
  const double plain = time_launches(run, count, false, launch);
  const double dependent = time_launches(run, count, true, launch);
  std::printf("%-54s %9.2f %9.2f", name, plain, dependent);
  if (bytes > 0) std::printf("  %7.0f GB/s", bytes / dependent * 1e-3);
  if (flops > 0) std::printf("  %7.1f TFLOP/s", flops / dependent * 1e-6);
  std::printf("\n");
  std::fflush(stdout);
}

struct Shape {
  std::uint32_t heads, kv_heads, head_dim;
  bool gated;
};

void time_attention(Launcher& run, const Shape& s, std::uint32_t context, std::uint32_t m, std::uint32_t dtype = decoder::kBf16) {
  const std::uint32_t block_tokens = 16;
  const std::uint32_t blocks = (context + block_tokens - 1) / block_tokens;
  CacheLayout layout{dtype, block_tokens, std::uint64_t{block_tokens} * s.kv_heads * s.head_dim, s.kv_heads * s.head_dim,
                     s.head_dim};
  const std::size_t layer = blocks * layout.block_stride;
  const std::size_t width = dtype == decoder::kBf16 ? 2 : 4;
  // Enough layers that none is still in L2 when its turn comes again.
  const auto layers = static_cast<int>(std::clamp<std::size_t>((std::size_t{160} << 20) / (2 * layer * width), 2, 64));
  Random random(7);
  const Dev<std::int32_t> table(random.permutation(blocks));
  Dev<std::uint8_t> keys(layers * layer * width), values(layers * layer * width);
  if (dtype == decoder::kBf16) {
    fill_bf16<<<1024, 256>>>(reinterpret_cast<std::uint16_t*>(keys.ptr()), layers * layer);
    fill_bf16<<<1024, 256>>>(reinterpret_cast<std::uint16_t*>(values.ptr()), layers * layer);
  } else {
    fill<<<1024, 256>>>(reinterpret_cast<float*>(keys.ptr()), layers * layer, 1);
    fill<<<1024, 256>>>(reinterpret_cast<float*>(values.ptr()), layers * layer, 1);
  }
  const Dev<StepHeader> step(step_of(context - m, 0));
  const std::uint32_t q_stride = s.head_dim * (s.gated ? 2 : 1);
  const Dev<float> q = filled(std::size_t{m} * s.heads * q_stride);
  const Dev<float> k = filled(std::size_t{m} * s.kv_heads * s.head_dim);
  const Dev<float> norm = filled(s.head_dim);
  const Dev<float> rotary_table = filled(std::size_t{m} * s.head_dim);
  const Dev<float> out(std::size_t{m} * s.heads * s.head_dim);
  Dev<float> scratch(decoder::attend_scratch_bytes(s.heads, s.kv_heads, s.head_dim, run.chip) / 4);
  scratch.zero();
  const RotateStoreParams store{.m = m,
                                .num_heads = s.heads,
                                .num_kv_heads = s.kv_heads,
                                .head_dim = s.head_dim,
                                .pairs = s.head_dim / 2,
                                .interleaved = 0,
                                .ld_q = s.heads * q_stride,
                                .q_head_stride = q_stride,
                                .ld_kv = s.kv_heads * s.head_dim,
                                .norm_eps = 1e-5F,
                                .cache = layout};
  const AttendParams p{.m = m,
                       .num_heads = s.heads,
                       .num_kv_heads = s.kv_heads,
                       .head_dim = s.head_dim,
                       .ld_q = store.ld_q,
                       .q_head_stride = q_stride,
                       .gated = s.gated,
                       .scale = 0.1F,
                       .cache = layout};
  const RotateAttendParams fused{.rotate = store, .gated = s.gated, .scale = 0.1F};
  const auto at = [&](const Dev<std::uint8_t>& cache, int i) { return cache.ptr() + i % layers * layer * width; };
  char name[128];
  const char* type = dtype == decoder::kBf16 ? "bf16" : "f32";
  const int count = context >= 16384 || m > 1 ? 2 * layers : 256;
  const double bytes = 2.0 * context * s.kv_heads * s.head_dim * static_cast<double>(width);
  if (m > 1) {
    std::snprintf(name, sizeof name, "attend %s %u/%ux%u m %u context %u", type, s.heads, s.kv_heads, s.head_dim, m, context);
    const double keys_seen = m * (context - m) + 0.5 * m * (m + 1);
    report(run, name, 0, 4 * keys_seen * s.heads * s.head_dim, std::min(count, 16), [&](int i) {
      run(attend, decoder::plan_attend(p), q.ptr(), at(keys, i), at(values, i), step.ptr(), table.ptr(), out.ptr(), p);
    });
    return;
  }
  std::snprintf(name, sizeof name, "rotate_attend %s %u/%ux%u context %u", type, s.heads, s.kv_heads, s.head_dim, context);
  report(run, name, bytes, 0, count, [&](int i) {
    run(rotate_attend, decoder::plan_rotate_attend(store, true, run.chip), q.ptr(), k.ptr(), k.ptr(), norm.ptr(), norm.ptr(),
        rotary_table.ptr(), step.ptr(), table.ptr(), at(keys, i), at(values, i), out.ptr(), scratch.ptr(), fused);
  });
  std::snprintf(name, sizeof name, "attend_one %s %u/%ux%u context %u", type, s.heads, s.kv_heads, s.head_dim, context);
  report(run, name, bytes, 0, count, [&](int i) {
    run(attend_one, decoder::plan_attend_one(p, run.chip), q.ptr(), at(keys, i), at(values, i), step.ptr(), table.ptr(), out.ptr(),
        p);
  });
  if (context != 512) return;
  std::snprintf(name, sizeof name, "rotate_store %s %u/%ux%u", type, s.heads, s.kv_heads, s.head_dim);
  report(run, name, 0, 0, count, [&](int i) {
    run(rotate_store, decoder::plan_rotate_store(store), q.ptr(), k.ptr(), k.ptr(), norm.ptr(), norm.ptr(), rotary_table.ptr(),
        step.ptr(), table.ptr(), at(keys, i), at(values, i), store);
  });
}

void time_recurrence(Launcher& run, std::uint32_t m) {
  const std::uint32_t key_heads = 16;
  const std::uint32_t value_heads = 32;
  const std::uint32_t channels = 128 * (2 * key_heads + value_heads);
  const int layers = 48;
  const std::size_t state_size = std::size_t{value_heads} * 128 * 128;
  const Dev<StepHeader> step(step_of(5, 0));
  const Dev<float> x = filled(std::size_t{m} * channels);
  const Dev<float> z = filled(std::size_t{m} * value_heads * 128);
  const Dev<float> ab = filled(std::size_t{m} * value_heads);
  const Dev<float> small = filled(channels * 4, 0.5F);
  const Dev<float> state = filled(layers * state_size, 0.1F);
  const Dev<float> conv_state = filled(std::size_t{layers} * 3 * channels);
  const Dev<float> out(std::size_t{m} * value_heads * 128);
  const Dev<float> decay(std::vector<float>(value_heads, -0.1F));
  const ConvParams c{.m = m, .channels = channels, .kernel = 4, .ld_x = channels};
  const DeltaParams p{.m = m,
                      .num_key_heads = key_heads,
                      .num_value_heads = value_heads,
                      .key_dim = 128,
                      .value_dim = 128,
                      .tiled = 0,
                      .ld_qkv = channels,
                      .ld_z = value_heads * 128,
                      .ld_ab = value_heads,
                      .norm_eps = 1e-6F};
  char name[128];
  const int count = m == 1 ? 192 : 16;
  std::snprintf(name, sizeof name, "conv %u channels m %u", channels, m);
  report(run, name, (2.0 * m + 6) * channels * 4, 0, count, [&](int i) {
    run(conv, decoder::plan_conv(c), x.ptr(), small.ptr(), conv_state.ptr() + std::size_t(i % layers) * 3 * channels, step.ptr(),
        c);
  });
  std::snprintf(name, sizeof name, "delta %u heads of 128x128 m %u", value_heads, m);
  report(run, name, m == 1 ? 2.0 * state_size * 4 : 0, 6.0 * m * state_size, count, [&](int i) {
    run(delta, decoder::plan_delta(p), x.ptr(), z.ptr(), ab.ptr(), ab.ptr(), decay.ptr(), small.ptr(), small.ptr(),
        state.ptr() + (i % layers) * state_size, step.ptr(), out.ptr(), p);
  });
}

void time_rows(Launcher& run, std::uint32_t n, std::uint32_t rows) {
  const Dev<float> logits = filled(std::size_t{rows} * n, 10);
  const Dev<std::int32_t> ids(std::vector<std::int32_t>(rows, 5));
  const Dev<RowScore> scores(rows);
  const RowsParams p{rows, n, n};
  char name[128];
  std::snprintf(name, sizeof name, "argmax %u x %u", rows, n);
  report(run, name, 4.0 * rows * n, 0, 128, [&](int) { run(argmax, decoder::plan_rows(p), logits.ptr(), ids.ptr(), p); });
  const Dev<std::int32_t> targets(std::vector<std::int32_t>(rows, 5));
  std::snprintf(name, sizeof name, "score %u x %u", rows, n);
  report(run, name, 4.0 * rows * n, 0, 128,
         [&](int) { run(score, decoder::plan_rows(p), logits.ptr(), targets.ptr(), scores.ptr(), p); });
}

/// Convolution and delta rule in turn, each on what the other left: with dependent launches, to the bit as without.
void check_dependent_launches(Launcher& run) {
  const std::uint32_t channels = 128 * 6;
  const ConvParams c{.m = 1, .channels = channels, .kernel = 4, .ld_x = channels};
  const DeltaParams p{.m = 1,
                      .num_key_heads = 2,
                      .num_value_heads = 2,
                      .key_dim = 128,
                      .value_dim = 128,
                      .tiled = 0,
                      .ld_qkv = channels,
                      .ld_z = 256,
                      .ld_ab = 2,
                      .norm_eps = 1e-6F};
  std::vector<std::vector<float>> results;
  for (const bool dependent : {false, true, true, true}) {
    Launcher r = run;
    CHECK_CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    r.dependent = dependent;
    const Dev<StepHeader> step(step_of(5, 0));
    const Dev<float> x = filled(channels);
    const Dev<float> small = filled(channels * 4, 0.5F);
    const int layers = 24;
    const Dev<float> state = filled(layers * 2 * 128 * 128, 0.1F);
    const Dev<float> conv_state = filled(layers * 3 * channels);
    const Dev<float> decay(std::vector<float>(2, -0.1F));
    CHECK_CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < layers; ++i) {
      r(conv, decoder::plan_conv(c), x.ptr(), small.ptr(), conv_state.ptr() + std::size_t(i) * 3 * channels, step.ptr(), c);
      r(delta, decoder::plan_delta(p), x.ptr(), x.ptr() + 512, x.ptr(), x.ptr() + 7, decay.ptr(), small.ptr(), small.ptr(),
        state.ptr() + std::size_t(i) * 2 * 128 * 128, step.ptr(), x.ptr() + 256, p);
    }
    std::vector<float> result = x.get();
    for (const float v : state.get()) result.push_back(v);
    for (const float v : conv_state.get()) result.push_back(v);
    results.push_back(result);
    CHECK_CUDA(cudaStreamDestroy(r.stream));
  }
  for (std::size_t i = 1; i < results.size(); ++i)
    expect("dependent launches", std::memcmp(results[0].data(), results[i].data(), results[0].size() * 4) == 0, "conv and delta");
}

int main_of(const std::string& what) {
  alarm(150);  // a kernel that hangs ends the program
  Launcher run;
  cudaDeviceProp device{};
  CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
  run.chip = {static_cast<std::uint32_t>(device.multiProcessorCount), static_cast<std::uint32_t>(device.sharedMemPerBlockOptin)};
  std::printf("%s, %u SMs, %u bytes of shared memory a block\n", device.name, run.chip.sm_count, run.chip.max_shared_bytes);
  if (what != "time") {
    check_widen(run);
    check_rows(run);
    check_conv(run);
    check_delta(run);
    check_dependent_launches(run);
    check_attention(run);
    std::printf("%-22s %6s %6s  %s\n", "kernel", "cases", "failed", "worst relative L2 (allowed)");
    for (const auto& [kernel, tally] : tallies())
      std::printf("%-22s %6d %6d  %.2e (%.0e)\n", kernel.c_str(), tally.cases, tally.failed, tally.worst, tally.allowed);
    std::fflush(stdout);
  }
  if (what != "check") {
    spin<<<device.multiProcessorCount, 128>>>(1'900'000'000LL);
    CHECK_CUDA(cudaDeviceSynchronize());
    std::printf("%-54s %9s %9s\n", "us a launch in a graph", "plain", "dependent");
    report(run, "nothing, 1 block", 0, 0, 512, [&](int) { run(nothing, Plan{1, 1, 32, 0}); });
    report(run, "nothing, 128 blocks of 256", 0, 0, 512, [&](int) { run(nothing, Plan{128, 1, 256, 0}); });
    for (const std::uint32_t context : {512U, 4096U, 32768U, 131072U}) time_attention(run, {32, 8, 128, false}, context, 1);
    for (const std::uint32_t context : {512U, 8192U}) time_attention(run, {9, 3, 64, false}, context, 1);
    for (const std::uint32_t context : {512U, 32768U}) time_attention(run, {16, 4, 256, true}, context, 1);
    time_attention(run, {32, 8, 128, false}, 512, 1, decoder::kF32);
    for (const std::uint32_t context : {512U, 4096U}) time_attention(run, {32, 8, 128, false}, context, 512);
    for (const std::uint32_t context : {512U, 4096U}) time_attention(run, {9, 3, 64, false}, context, 512);
    for (const std::uint32_t context : {512U, 4096U}) time_attention(run, {16, 4, 256, true}, context, 512);
    time_attention(run, {9, 3, 64, false}, 512, 512, decoder::kF32);
    time_recurrence(run, 1);
    time_recurrence(run, 512);
    time_rows(run, 128256, 1);
    time_rows(run, 151936, 1);
    time_rows(run, 128256, 64);
  }
  std::printf("%s\n", failures() == 0 ? "all right" : "WRONG RESULTS");
  return failures() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  if (argc > 2) bench::wanted() = argv[2];
  return bench::main_of(argc > 1 ? argv[1] : "");
}
