// SPDX-License-Identifier: Apache-2.0
//
// Writes golden.json: what llama.cpp makes of five prompts, greedily, with the margin of its top two logits at each step. Not part
// of the build. With llama.cpp (0.3.36 of llama-cpp-python's source) configured as scripts/reference does and built as shared
// libraries:
//   g++ -std=c++20 -O2 -I$SOURCE/include -I$SOURCE/ggml/include make_golden.cpp -L$BUILD/bin -lllama -lggml -lggml-base -lggml-cpu
//       -Wl,-rpath,$BUILD/bin -o make_golden
//   ./make_golden SmolLM2-135M-Instruct.Q4_1.gguf > golden.json
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "llama.h"

namespace {

constexpr const char* kSystem =
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n";

std::string chat(const std::string& question, const char* system = kSystem) {
  return system + ("<|im_start|>user\n" + question + "<|im_end|>\n<|im_start|>assistant\n");
}

void die(const char* what) {
  std::fprintf(stderr, "%s failed\n", what);
  std::exit(1);
}

void print_list(const char* name, const std::vector<llama_token>& values) {
  std::printf("   \"%s\": [", name);
  for (std::size_t i = 0; i < values.size(); ++i) std::printf("%s%d", i == 0 ? "" : ", ", values[i]);
  std::printf("],\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) die("usage: make_golden MODEL; which");
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (!model) die("loading");
  const llama_vocab* vocab = llama_model_get_vocab(model);
  const int num_logits = llama_vocab_n_tokens(vocab);
  constexpr int kSteps = 64;
  const std::vector<std::string> prompts{
      chat("What is the capital of France?", ""), chat("Explain in two sentences why the sky is blue."),
      chat("Write a Python function that reverses a string."), "Once upon a time, in a village by the sea,",
      "The first law of thermodynamics states that"};
  std::printf(
      "{\n \"model\": \"SmolLM2-135M-Instruct.Q4_1.gguf\",\n \"made_by\": \"llama.cpp in llama-cpp-python 0.3.36, "
      "make_golden.cpp\",\n"
      " \"prompts\": [\n");
  for (std::size_t n = 0; n < prompts.size(); ++n) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 512;
    params.n_threads = params.n_threads_batch = 1;
    llama_context* context = llama_init_from_model(model, params);
    if (!context) die("making a context");
    std::vector<llama_token> ids(512);
    ids.resize(
        static_cast<std::size_t>(std::max(0, llama_tokenize(vocab, prompts[n].data(), static_cast<int>(prompts[n].size()),
                                                            ids.data(), 512, /*add_special=*/true, /*parse_special=*/true))));
    if (ids.empty()) die("tokenizing");
    std::vector<llama_token> next(ids), greedy;
    std::vector<float> margins;
    for (int step = 0; step < kSteps; ++step) {
      if (llama_decode(context, llama_batch_get_one(next.data(), static_cast<int>(next.size()))) != 0) die("decoding");
      const float* logits = llama_get_logits_ith(context, -1);
      const int best = static_cast<int>(std::max_element(logits, logits + num_logits) - logits);
      float second = -1e30F;
      for (int i = 0; i < num_logits; ++i) {
        if (i != best) second = std::max(second, logits[i]);
      }
      greedy.push_back(best);
      margins.push_back(logits[best] - second);
      next = {best};
    }
    std::printf("  {\n");
    print_list("prompt", ids);
    print_list("greedy", greedy);
    std::printf("   \"margins\": [");
    for (std::size_t i = 0; i < margins.size(); ++i) std::printf("%s%.4f", i == 0 ? "" : ", ", static_cast<double>(margins[i]));
    std::printf("]\n  }%s\n", n + 1 == prompts.size() ? "" : ",");
    llama_free(context);
  }
  std::printf(" ]\n}\n");
  llama_model_free(model);
}
