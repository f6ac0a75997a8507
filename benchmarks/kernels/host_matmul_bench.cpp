// SPDX-License-Identifier: Apache-2.0
//
// Host matrix kernels alone: single products, and all the products of a SmolLM2-135M token (decode) or 512-token prompt (prefill).
// Weights are random and as large as the model's, so decode streams them from memory; blocks of a launch are shared between
// `threads` spinning workers by an atomic counter, as the host backend does. Beside each time stands the floor: weight bytes over
// the read bandwidth that `BM_read` measures, or multiply-adds over what the machine's tiles or vectors can issue.
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/host/matmul/matmul.h"

namespace {

using namespace metrale;
using namespace metrale::host::matmul;

/// Runs the blocks of one launch after another on `threads` workers, the caller being one of them.
class Workers {
 public:
  explicit Workers(std::uint32_t threads) : threads_(threads) {
    for (std::uint32_t i = 1; i < threads; ++i) others_.emplace_back([this, i](const std::stop_token& stop) { serve(stop, i); });
  }
  ~Workers() {
    for (auto& t : others_) t.request_stop();
  }

  /// `body(block, worker)`.
  using Body = std::function<void(std::uint32_t, std::uint32_t)>;
  void run(std::uint32_t blocks, const Body& body) {
    body_ = &body;
    blocks_ = blocks;
    done_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);
    work(0);
    for (std::uint64_t idle = 0; done_.load(std::memory_order_acquire) != threads_;) {
      if (++idle % 4096 == 0) std::this_thread::yield();
      __builtin_ia32_pause();
    }
  }
  std::uint32_t threads() const { return threads_; }

 private:
  void work(std::uint32_t worker) {
    for (std::uint32_t b; (b = next_.fetch_add(1, std::memory_order_relaxed)) < blocks_;) (*body_)(b, worker);
    done_.fetch_add(1, std::memory_order_release);
  }
  void serve(const std::stop_token& stop, std::uint32_t worker) {
    for (std::uint64_t seen = 0, idle = 0; !stop.stop_requested();) {
      if (epoch_.load(std::memory_order_acquire) == seen) {
        if (++idle % 4096 == 0) std::this_thread::yield();
        __builtin_ia32_pause();
        continue;
      }
      ++seen;
      work(worker);
    }
  }

  std::uint32_t threads_;
  const Body* body_ = nullptr;
  std::uint32_t blocks_ = 0;
  alignas(64) std::atomic<std::uint64_t> epoch_{0};
  alignas(64) std::atomic<std::uint32_t> next_{0};
  alignas(64) std::atomic<std::uint32_t> done_{0};
  std::vector<std::jthread> others_;
};

struct Buffer {
  // On huge pages, as the weight arena is: without them the page walks of a virtual machine halve what a core can read.
  explicit Buffer(std::size_t size, bool huge_pages = true)
      : bytes(size), p(static_cast<std::byte*>(std::aligned_alloc(kHuge, round_up(size + 4096, kHuge)))) {
    madvise(p.get(), round_up(size + 4096, kHuge), huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  }
  static constexpr std::size_t kHuge = 2u << 20;
  std::size_t bytes;
  struct Free {
    void operator()(std::byte* q) const { std::free(q); }
  };
  std::unique_ptr<std::byte, Free> p;
};

/// Bytes with plausible scales: random everywhere, small f16 where a block keeps its scale.
void fill_weights(DType type, std::byte* p, std::size_t bytes, std::mt19937& random) {
  for (std::size_t i = 0; i + 4 <= bytes; i += 4) {
    const std::uint32_t v = random();
    std::memcpy(p + i, &v, 4);
  }
  const DTypeFacts& f = dtype_facts(type);
  for (std::size_t b = 0; b + f.block_bytes <= bytes; b += f.block_bytes) {
    const auto half = [&](std::size_t at) {
      const auto h = static_cast<std::uint16_t>(0x2000 | (random() & 0x3ff));
      std::memcpy(p + b + at, &h, 2);
    };
    switch (type) {
      case DType::q4_0:
      case DType::q8_0: half(0); break;
      case DType::q4_1:
      case DType::q4_k: half(0), half(2); break;
      case DType::q6_k: half(208); break;
      case DType::f16: half(0); break;
      case DType::bf16: p[b + 1] = std::byte{0x3c}; break;
      default: p[b + 3] = std::byte{0x3c}; break;
    }
  }
}

class Session {
 public:
  Session(Isa isa, std::uint32_t threads) : workers_(threads), table_(kernels(isa)) {
    for (std::uint32_t i = 0; i < threads; ++i) shared_.push_back(std::make_unique<Buffer>(4u << 20));
  }

  template <class... Args>
  void launch(const Plan& plan, const Args&... args) {
    const void* params[] = {static_cast<const void*>(&args)...};
    const auto kernel = std::find_if(table_.begin(), table_.end(), [&](const auto& k) { return k.function == plan.function; });
    const char* fault = nullptr;
    const Workers::Body body = [&](std::uint32_t b, std::uint32_t worker) {
      kernel->fn({plan.grid, {1, 1, 1}, {b, 0, 0}, {shared_[worker]->p.get(), plan.shared_bytes}, params, &fault});
    };
    workers_.run(plan.grid.x, body);
    if (fault != nullptr) throw std::runtime_error(fault);
  }
  std::uint32_t threads() const { return workers_.threads(); }
  /// Memory for weights, from one region.
  std::byte* arena(std::size_t bytes) {
    std::byte* p = arena_.p.get() + arena_used_;
    arena_used_ += round_up(bytes, kDeviceAlignment);
    if (arena_used_ > arena_.bytes) throw std::bad_alloc();
    return p;
  }

 private:
  Buffer arena_{256u << 20};
  std::size_t arena_used_ = 0;
  Workers workers_;
  std::span<const host::HostKernel> table_;
  std::vector<std::unique_ptr<Buffer>> shared_;
};

std::uint64_t address(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

struct Weight {
  Weight(Session& session, DType t, std::uint32_t rows, std::uint32_t columns, std::mt19937& random)
      : type(t), n(rows), k(columns), bytes(rows * row_bytes(t, columns)), data(session.arena(bytes)) {
    fill_weights(type, data, bytes, random);
    session.launch(plan_repack(type, n, k), at(), RepackParams{n, k, static_cast<std::uint32_t>(type)});
  }
  std::uint64_t at() const { return address(data); }
  Matrix matrix() const { return {n, static_cast<std::uint32_t>(type), 1, n}; }
  DType type;
  std::uint32_t n, k;
  std::size_t bytes;
  std::byte* data;
};

struct Activations {
  Activations(std::size_t count, std::mt19937& random) : values(count) {
    std::normal_distribution<float> normal;
    for (float& v : values) v = normal(random);
  }
  std::uint64_t at() const { return address(values.data()); }
  std::vector<float> values;
};

LinearParams params(std::uint32_t m, std::uint32_t k) {
  LinearParams p;
  p.m = m, p.k = k, p.ld_x = k, p.norm_dtype = static_cast<std::uint32_t>(DType::f32), p.norm_eps = 1e-5f;
  return p;
}

constexpr std::uint64_t kNone = 0;

/// All matrix products of SmolLM2-135M: 30 layers of width 576, 9 query and 3 key-value heads of 64, feed-forward 1536.
class Model {
 public:
  static constexpr std::uint32_t kLayers = 30, kWidth = 576, kKv = 192, kInner = 1536, kVocabulary = 49152;

  Model(Session& session, std::uint32_t tokens) : session_(session), tokens_(tokens) {
    for (std::uint32_t i = 0; i < kLayers; ++i) layers_.push_back(std::make_unique<Layer>(session, random_));
    head_ = std::make_unique<Weight>(session, DType::q8_0, kVocabulary, kWidth, random_);
    const auto rows = [&](std::size_t width) { return Activations(tokens * width, random_).values; };
    x_ = rows(kWidth), q_ = rows(kWidth), k_ = rows(kKv), v_ = rows(kKv), attended_ = rows(kWidth), inner_ = rows(kInner);
    norm_ = Activations(kWidth, random_).values;
    logits_.resize(kVocabulary);
    prepared_ = std::make_unique<Buffer>(prepared_bytes(tokens, kInner));
  }

  std::uint64_t bytes() const { return kLayers * layers_[0]->bytes() + head_->bytes; }
  double multiply_adds() const { return kLayers * (2.0 * kWidth * kWidth + 2.0 * kWidth * kKv + 3.0 * kWidth * kInner) * tokens_; }

  void step() {
    for (auto& layer : layers_) run(*layer);
    LinearParams p = params(1, kWidth);
    p.w[0] = head_->matrix();
    session_.launch(plan_linear("linear", p, session_.threads()), address(x_.data()), address(norm_.data()), head_->at(), kNone,
                    kNone, address(logits_.data()), p);
  }

 private:
  struct Layer {
    Layer(Session& s, std::mt19937& r)
        : q(s, DType::q4_1, kWidth, kWidth, r),
          k(s, DType::q4_1, kKv, kWidth, r),
          v(s, DType::q4_1, kKv, kWidth, r),
          o(s, DType::q4_1, kWidth, kWidth, r),
          gate(s, DType::q4_1, kInner, kWidth, r),
          up(s, DType::q4_1, kInner, kWidth, r),
          down(s, DType::q4_1, kWidth, kInner, r) {}
    std::uint64_t bytes() const { return q.bytes + k.bytes + v.bytes + o.bytes + gate.bytes + up.bytes + down.bytes; }
    Weight q, k, v, o, gate, up, down;
  };

  struct Input {
    std::uint64_t x, norm;
  };
  Input input(LinearParams& p, const std::vector<float>& x, bool with_norm) {
    const Input plain{address(x.data()), with_norm ? address(norm_.data()) : 0};
    if (p.m <= kFusedRows) return plain;
    const std::uint64_t out = address(prepared_->p.get());
    session_.launch(plan_prepare(p.m, p.k), plain.x, plain.norm, out, p);
    p.prepared = 1;
    return {out, 0};
  }
  void run(const Layer& l) {
    LinearParams p = params(tokens_, kWidth);
    p.w[0] = l.q.matrix(), p.w[1] = l.k.matrix(), p.w[2] = l.v.matrix();
    Input in = input(p, x_, true);
    session_.launch(plan_linear("linear4", p, session_.threads()), in.x, in.norm, l.q.at(), l.k.at(), l.v.at(), kNone, kNone, kNone,
                    kNone, kNone, address(q_.data()), address(k_.data()), address(v_.data()), kNone, p);
    p = params(tokens_, kWidth);
    p.w[0] = l.o.matrix();
    in = input(p, attended_, false);
    session_.launch(plan_linear("linear", p, session_.threads()), in.x, in.norm, l.o.at(), kNone, address(x_.data()),
                    address(x_.data()), p);
    p = params(tokens_, kWidth);
    p.w[0] = l.gate.matrix(), p.w[1] = l.up.matrix();
    in = input(p, x_, true);
    session_.launch(plan_linear("swiglu", p, session_.threads()), in.x, in.norm, l.gate.at(), l.up.at(), address(inner_.data()), p);
    p = params(tokens_, kInner);
    p.w[0] = l.down.matrix();
    in = input(p, inner_, false);
    session_.launch(plan_linear("linear", p, session_.threads()), in.x, in.norm, l.down.at(), kNone, address(x_.data()),
                    address(x_.data()), p);
    for (float& v : x_) v *= 0.01f;  // stands for the model's own scaling; keeps values finite over many layers
  }

  Session& session_;
  std::uint32_t tokens_;
  std::mt19937 random_{3};
  std::vector<std::unique_ptr<Layer>> layers_;
  std::unique_ptr<Weight> head_;
  std::vector<float> x_, q_, k_, v_, attended_, inner_, norm_, logits_;
  std::unique_ptr<Buffer> prepared_;
};

/// Plain reading of as many bytes as a decode step does: what weights cost at least.
void BM_read(benchmark::State& state) {
  const auto threads = static_cast<std::uint32_t>(state.range(0));
  Workers workers(threads);
  Buffer data(96u << 20, state.range(1) != 0);
  std::memset(data.p.get(), 1, data.bytes);
  std::atomic<std::uint64_t> sink{0};
  const std::uint32_t blocks = 64;
  for (auto _ : state) {
    workers.run(blocks, [&](std::uint32_t b, std::uint32_t) {
      // One word of each line is enough to bring it to the core.
      const auto* p = reinterpret_cast<const std::uint64_t*>(data.p.get() + data.bytes / blocks * b);
      std::uint64_t sum[4] = {};
      for (std::size_t i = 0; i < data.bytes / blocks / 8; i += 32) {
        for (int j = 0; j < 4; ++j) {
          __builtin_prefetch(p + i + 8 * j + 1024, 0, 2);
          sum[j] += p[i + 8 * static_cast<std::size_t>(j)];
        }
      }
      sink += sum[0] + sum[1] + sum[2] + sum[3];
    });
  }
  benchmark::DoNotOptimize(sink.load());
  state.SetBytesProcessed(static_cast<std::int64_t>(data.bytes) * state.iterations());
}
BENCHMARK(BM_read)
    ->ArgNames({"threads", "huge_pages"})
    ->ArgsProduct({{1, 2}, {0, 1}})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

void BM_model(benchmark::State& state, Isa isa, std::uint32_t tokens, std::uint32_t threads) {
  Session session(isa, threads);
  Model model(session, tokens);
  model.step();
  for (auto _ : state) model.step();
  state.SetItemsProcessed(static_cast<std::int64_t>(tokens) * state.iterations());
  state.SetBytesProcessed(static_cast<std::int64_t>(model.bytes()) * state.iterations());
  state.counters["multiply_adds_per_s"] =
      benchmark::Counter(model.multiply_adds() * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

void BM_linear(benchmark::State& state, Isa isa, DType type, std::uint32_t m) {
  // 64 MiB or more of weights in turn, so that no product finds its own in cache.
  constexpr std::uint32_t kN = 1536, kK = 1536;
  Session session(isa, 2);
  std::mt19937 random{5};
  std::vector<std::unique_ptr<Weight>> weights;
  for (std::uint64_t bytes = 0; bytes < (64u << 20); bytes += weights.back()->bytes)
    weights.push_back(std::make_unique<Weight>(session, type, kN, kK, random));
  const Activations x(std::size_t{m} * kK, random);
  Activations y(std::size_t{m} * kN, random);
  Buffer prepared(prepared_bytes(m, kK));
  std::size_t i = 0;
  for (auto _ : state) {
    const Weight& w = *weights[i++ % weights.size()];
    LinearParams p = params(m, kK);
    p.w[0] = w.matrix();
    std::uint64_t in = x.at();
    if (m > kFusedRows) {
      in = address(prepared.p.get());
      session.launch(plan_prepare(m, kK), x.at(), kNone, in, p);
      p.prepared = 1;
    }
    session.launch(plan_linear("linear", p, 2), in, kNone, w.at(), kNone, kNone, y.at(), p);
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(weights[0]->bytes) * state.iterations());
  state.counters["multiply_adds_per_s"] =
      benchmark::Counter(static_cast<double>(m) * kN * kK * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  for (const Isa isa : {Isa::generic, Isa::avx2, Isa::avx512, Isa::amx}) {
    if (select_isa(isa) != isa) continue;
    const std::string name(to_string(isa));
    for (const std::uint32_t threads : {1u, 2u}) {
      const std::string suffix = "/" + name + "/threads:" + std::to_string(threads);
      benchmark::RegisterBenchmark(("decode_token" + suffix).c_str(), [=](auto& s) { BM_model(s, isa, 1, threads); })
          ->UseRealTime()
          ->Unit(benchmark::kMicrosecond);
      benchmark::RegisterBenchmark(("prefill_512" + suffix).c_str(), [=](auto& s) { BM_model(s, isa, 512, threads); })
          ->UseRealTime()
          ->Unit(benchmark::kMillisecond);
    }
    for (const DType type :
         {DType::f32, DType::f16, DType::bf16, DType::q4_0, DType::q4_1, DType::q8_0, DType::q4_k, DType::q6_k}) {
      for (const std::uint32_t m : {1u, 4u, 8u, 64u, 512u}) {
        benchmark::RegisterBenchmark(("linear/" + name + "/" + std::string(to_string(type)) + "/rows:" + std::to_string(m)).c_str(),
                                     [=](auto& s) { BM_linear(s, isa, type, m); })
            ->UseRealTime()
            ->Unit(benchmark::kMicrosecond);
      }
    }
  }
  benchmark::RunSpecifiedBenchmarks();
}
