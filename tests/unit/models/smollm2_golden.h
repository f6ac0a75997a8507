// SPDX-License-Identifier: Apache-2.0
//
// SmolLM2-135M-Instruct as a quantised GGUF file, where METRALE_SMOLLM2_GGUF names one, and what llama.cpp made of it.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <vector>

#include <nlohmann/json.hpp>

#include "model_fixture.h"

namespace metrale::test {

/// Empty when there is none.
inline std::filesystem::path smollm2_path() {
  const char* path = std::getenv("METRALE_SMOLLM2_GGUF");
  return path != nullptr ? path : "";
}

struct GoldenPrompt {
  std::vector<TokenId> prompt;
  std::vector<TokenId> greedy;
  std::vector<float> margins;
};

inline std::vector<GoldenPrompt> golden_prompts() {
  std::ifstream file(test_data() / "smollm2" / "golden.json");
  const nlohmann::json root = nlohmann::json::parse(file);
  std::vector<GoldenPrompt> prompts;
  for (const auto& p : root.at("prompts")) prompts.push_back({p.at("prompt"), p.at("greedy"), p.at("margins")});
  return prompts;
}

}  // namespace metrale::test
