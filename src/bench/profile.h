// SPDX-License-Identifier: Apache-2.0
//
// Where a decode step spends its time, by kernel. One thread.
#pragma once

#include <string>

#include "bench/session.h"
#include "metrale/models/decoder.h"

namespace metrale::bench {

/// Tokens that a profile appends to its sequence.
inline constexpr std::uint32_t kProfileTokens = 4;

/// Runs steps of one token launch by launch, queued up behind a kernel that waits, with an event after each launch. What the events
/// and the missing overlap of dependent launches add shows in `Profile::launched_us` against `step_us`. Needs the raw side.
/// `seconds`: of one token, as measured.
Result<Profile> profile_step(Session& session, Decoder& decoder, Sequence& sequence, std::string name, double seconds);

}  // namespace metrale::bench
