// SPDX-License-Identifier: Apache-2.0
//
// How switches are read: a pure function of a look-up, so that tests need no environment, and the set-once cell behind the switches
// a program may publish.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/switches.h"

namespace metrale::detail {

/// The value of an environment variable, or nullopt when it is unset.
using EnvLookup = std::function<std::optional<std::string>(std::string_view name)>;

struct ParsedSwitches {
  Switches values;
  std::vector<SwitchReport> report;
};
/// Reads every plain switch. A value that arms nothing leaves the default and is reported as ignored. Threads: any.
ParsedSwitches parse_switches(const EnvLookup& lookup);

/// The process's environment; the only place that reads it.
std::optional<std::string> read_environment(std::string_view name);

/// A switch that takes its first published value or, failing that, what the environment says at its first read; fixed from then on.
/// Threads: any.
class SetOnceSwitch {
 public:
  /// `armed`: the exact text of `name` that turns the switch away from `fallback`.
  constexpr SetOnceSwitch(std::string_view name, std::string_view summary, bool fallback, std::string_view armed)
      : name_(name), summary_(summary), armed_(armed), fallback_(fallback) {}

  void publish(bool value) noexcept;
  bool read(const EnvLookup& lookup);
  /// What a read would find now; does not fix the value.
  SwitchReport report(const EnvLookup& lookup) const;

 private:
  enum State : std::uint8_t { unset, from_default, from_environment, ignored_environment, from_program };
  struct Resolved {
    bool value;
    State state;
  };
  Resolved resolve(const EnvLookup& lookup) const;
  static constexpr std::uint8_t pack(Resolved r) noexcept { return static_cast<std::uint8_t>((r.state << 1) | (r.value ? 1 : 0)); }
  static constexpr Resolved unpack(std::uint8_t bits) noexcept { return {(bits & 1) != 0, static_cast<State>(bits >> 1)}; }

  std::string_view name_;
  std::string_view summary_;
  std::string_view armed_;
  bool fallback_;
  std::atomic<std::uint8_t> packed_{0};
};

}  // namespace metrale::detail
