// SPDX-License-Identifier: Apache-2.0
//
// What devices the code in a module image is for, read from the image itself, so that a module for another device is refused with
// both architectures named and before anything is loaded. Functions; any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace metrale::cuda {

/// Code in an image.
struct ImageCode {
  bool is_ptx = false;        ///< Text that the driver compiles; else machine code.
  unsigned sm = 0;            ///< 90 for sm_90: ten times the major number and the minor number.
  char variant = '\0';        ///< 'a': for exactly that device. 'f': for its family. '\0': neither.
  bool variant_known = true;  ///< A bare cubin does not say.
};

/// The codes of a fat binary, a cubin or PTX text; nullopt for what is none of them or is cut short: the driver judges it.
std::optional<std::vector<ImageCode>> codes_of(std::span<const std::byte> image);

/// Whether a device of compute capability `major`.`minor` can run it.
bool runs_on(const ImageCode& code, int major, int minor) noexcept;

/// "sm_80, sm_90a, PTX for sm_80".
std::string describe(std::span<const ImageCode> codes);

/// Whether the image is PTX text, which the driver wants with a zero at its end.
bool is_ptx(std::span<const std::byte> image) noexcept;

}  // namespace metrale::cuda
