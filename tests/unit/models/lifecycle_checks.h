// SPDX-License-Identifier: Apache-2.0
//
// One life of a model: loaded, used, unloaded, with nothing left on the ledger.
#pragma once

#include <filesystem>
#include <functional>

#include "metrale/models/generator.h"
#include "model_fixture.h"

namespace metrale::test {

class ModelLife {
 public:
  explicit ModelLife(const std::filesystem::path& folder) : folder_(folder), golden_(folder) {}

  /// Fails the test where a token is wrong or something stays behind. `while_loaded` runs before the unload.
  void once(GpuBackend& backend, const GeneratorOptions& options = {}, const std::function<void()>& while_loaded = {}) const {
    const auto prompt = golden_.prompt(0);
    const auto model = ok(Generator::load(folder_, backend, options));
    ASSERT_EQ(ok(model->generate(prompt, {.max_tokens = 8})).ids[0], golden_.greedy(0)[prompt.size()]);
    if (while_loaded) while_loaded();
    const Receipt receipt = model->unload();
    ASSERT_TRUE(receipt.clean()) << receipt.to_string();
    ASSERT_EQ(receipt.balance_bytes, 0);
    ASSERT_EQ(backend.live_alloc_count(), 0U);
  }

 private:
  std::filesystem::path folder_;
  Golden golden_;
};

}  // namespace metrale::test
