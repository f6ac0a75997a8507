// SPDX-License-Identifier: Apache-2.0
#include "metrale/switches.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>

#include "core/switches_parse.h"
#include "metrale/types.h"

namespace metrale {
namespace {

// Guard bands beyond this are a slip of the keyboard, and would overflow block sizes.
constexpr std::uint64_t kMaxRedzoneBytes = std::uint64_t{1} << 30;
constexpr std::uint64_t kMaxHostThreads = 4096;
constexpr std::uint64_t kMaxCudaDevice = 1023;

std::optional<std::uint64_t> decimal(std::string_view text, std::uint64_t max) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value > max) return std::nullopt;
  return value;
}

// One row for each switch: it sets a field when the text arms it, and shows the field's value.
struct Row {
  std::string_view name;
  std::string_view summary;
  bool (*apply)(Switches&, std::string_view);
  std::string (*show)(const Switches&);
};

template <bool Switches::* Field>
constexpr Row flag(std::string_view name, std::string_view summary) {
  return {name, summary,
          [](Switches& s, std::string_view text) {
            if (text != "1" && text != "0") return false;
            s.*Field = text == "1";
            return true;
          },
          [](const Switches& s) { return std::string(s.*Field ? "on" : "off"); }};
}

template <auto Field, std::uint64_t kMax>
constexpr Row number(std::string_view name, std::string_view summary) {
  return {name, summary,
          [](Switches& s, std::string_view text) {
            const auto value = decimal(text, kMax);
            if (!value) return false;
            s.*Field = static_cast<std::remove_cvref_t<decltype(s.*Field)>>(*value);
            return true;
          },
          [](const Switches& s) { return fmt::format("{}", s.*Field); }};
}

constexpr std::uint64_t kAny = ~std::uint64_t{0};

constexpr std::array kRows{
    Row{"METRALE_REDZONE", "guard band after each block, in bytes",
        [](Switches& s, std::string_view text) {
          const auto value = decimal(text, kMaxRedzoneBytes);
          if (!value) return false;
          s.redzone_bytes = round_up(*value, 16);
          return true;
        },
        [](const Switches& s) { return fmt::format("{}", s.redzone_bytes); }},
    number<&Switches::redzone_fill, 255>("METRALE_REDZONE_FILL", "byte that guard bands are filled with"),
    number<&Switches::redzone_min_idx, kAny>("METRALE_REDZONE_MIN_IDX", "guard only blocks created at this index or later"),
    Row{"METRALE_REDZONE_TRACE_IDX", "log the caller of the allocation with this index",
        [](Switches& s, std::string_view text) {
          const auto value = decimal(text, kAny);
          if (value) s.redzone_trace_idx = value;
          return value.has_value();
        },
        [](const Switches& s) { return s.redzone_trace_idx ? fmt::format("{}", *s.redzone_trace_idx) : std::string("none"); }},
    flag<&Switches::unchecked>("METRALE_UNCHECKED", "copies skip the check of their ends"),
    flag<&Switches::debug_sync_kernels>("METRALE_DEBUG_SYNC_KERNELS", "wait after each launch, so that a fault names its kernel"),
    flag<&Switches::kv_poison>("METRALE_KV_POISON", "fill freed KV blocks with NaN"),
    flag<&Switches::kv_trace>("METRALE_KV_TRACE", "keep each KV block's reference history"),
    flag<&Switches::ssm_tail_ckpt>("METRALE_SSM_TAIL_CKPT", "end a prefill chunk at the last block boundary"),
    Row{"METRALE_HOST_ISA", "cap on host instructions: generic, avx2, avx512 or amx",
        [](Switches& s, std::string_view text) {
          constexpr std::array<std::string_view, 4> kNames{"generic", "avx2", "avx512", "amx"};
          if (std::find(kNames.begin(), kNames.end(), text) == kNames.end()) return false;
          s.host_isa = text;
          return true;
        },
        [](const Switches& s) { return s.host_isa.empty() ? std::string("best available") : s.host_isa; }},
    number<&Switches::host_threads, kMaxHostThreads>("METRALE_HOST_THREADS", "worker threads of the host backend; 0: one a core"),
    number<&Switches::cuda_device, kMaxCudaDevice>("METRALE_CUDA_DEVICE", "the device of the cuda backend, as the driver counts"),
    Row{"METRALE_KERNEL_PATH", "folder of CUDA modules that replace or add to those built in",
        [](Switches& s, std::string_view text) {
          s.kernel_path = text;
          return !text.empty();
        },
        [](const Switches& s) { return s.kernel_path.empty() ? std::string("none") : s.kernel_path; }},
    Row{"METRALE_CUBLASLT_CACHE", "folder where the cuBLASLt bridge keeps measured algorithms",
        [](Switches& s, std::string_view text) {
          s.cublaslt_cache = text;
          return !text.empty();
        },
        [](const Switches& s) { return s.cublaslt_cache.empty() ? std::string("none") : s.cublaslt_cache; }},
    Row{"METRALE_RENDEZVOUS", "where processes that were started together meet",
        [](Switches& s, std::string_view text) {
          s.rendezvous = text;
          return !text.empty();
        },
        [](const Switches& s) { return s.rendezvous.empty() ? std::string("none") : s.rendezvous; }},
};

const detail::ParsedSwitches& parsed() {
  static const detail::ParsedSwitches parsed = detail::parse_switches(detail::read_environment);
  return parsed;
}

constinit detail::SetOnceSwitch midchunk_switch("METRALE_SSM_TAIL_MIDCHUNK",
                                                "keep a prefill chunk whole and split only the recurrence at the boundary", true,
                                                "0");
constinit detail::SetOnceSwitch hermetic_switch("METRALE_HERMETIC", "never restore another request's state", false, "1");

}  // namespace

namespace detail {

std::optional<std::string> read_environment(std::string_view name) {
  const char* value = std::getenv(std::string(name).c_str());
  if (value == nullptr) return std::nullopt;
  return std::string(value);
}

ParsedSwitches parse_switches(const EnvLookup& lookup) {
  ParsedSwitches parsed;
  std::array<std::string_view, kRows.size()> sources;
  for (std::size_t i = 0; i < kRows.size(); ++i) {
    const std::optional<std::string> text = lookup(kRows[i].name);
    if (!text) {
      sources[i] = "default";
    } else {
      sources[i] = kRows[i].apply(parsed.values, *text) ? "environment" : "environment, ignored";
    }
  }
  for (std::size_t i = 0; i < kRows.size(); ++i) {
    parsed.report.push_back({kRows[i].name, kRows[i].summary, kRows[i].show(parsed.values), sources[i]});
  }
  return parsed;
}

void SetOnceSwitch::publish(bool value) noexcept {
  std::uint8_t expected = unset;
  packed_.compare_exchange_strong(expected, pack({value, from_program}), std::memory_order_relaxed);
}

bool SetOnceSwitch::read(const EnvLookup& lookup) {
  std::uint8_t bits = packed_.load(std::memory_order_relaxed);
  if (bits == unset) {
    const std::uint8_t wanted = pack(resolve(lookup));
    if (packed_.compare_exchange_strong(bits, wanted, std::memory_order_relaxed)) bits = wanted;
  }
  return unpack(bits).value;
}

SetOnceSwitch::Resolved SetOnceSwitch::resolve(const EnvLookup& lookup) const {
  const std::optional<std::string> text = lookup(name_);
  if (!text) return {fallback_, from_default};
  if (*text == armed_) return {!fallback_, from_environment};
  return {fallback_, *text == "0" || *text == "1" ? from_environment : ignored_environment};
}

SwitchReport SetOnceSwitch::report(const EnvLookup& lookup) const {
  const std::uint8_t bits = packed_.load(std::memory_order_relaxed);
  const Resolved resolved = bits == unset ? resolve(lookup) : unpack(bits);
  constexpr std::array<std::string_view, 5> kSources{"default", "default", "environment", "environment, ignored", "program"};
  return {name_, summary_, resolved.value ? "on" : "off", kSources[resolved.state]};
}

}  // namespace detail

const Switches& switches() { return parsed().values; }

std::vector<SwitchReport> switch_report() {
  std::vector<SwitchReport> report = parsed().report;
  report.push_back(midchunk_switch.report(detail::read_environment));
  report.push_back(hermetic_switch.report(detail::read_environment));
  return report;
}

void set_ssm_tail_midchunk(std::optional<bool> value) {
  if (value) midchunk_switch.publish(*value);
}
bool ssm_tail_midchunk() { return midchunk_switch.read(detail::read_environment); }

void set_hermetic(bool value) {
  if (value) hermetic_switch.publish(true);
}
bool hermetic() { return hermetic_switch.read(detail::read_environment); }

std::optional<std::uint64_t> ssm_tail_boundary(std::uint64_t total, std::uint64_t block) noexcept {
  if (block == 0 || total <= block) return std::nullopt;
  return (total - 1) / block * block;
}

}  // namespace metrale
