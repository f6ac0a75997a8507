// SPDX-License-Identifier: Apache-2.0
//
// A language model through the library: load it on the host backend, let it go on with a text, unload it and look at the receipt.
// Usage: example_generate MODEL PROMPT, where MODEL is a GGUF file or a Hugging Face folder.
#include <cstdio>
#include <string_view>

#include "metrale/backends/host.h"
#include "metrale/backends/host_kernels.h"
#include "metrale/models/generator.h"

using metrale::Result;

namespace {

Result<bool> generate(const char* path, const char* prompt) {
  metrale::host::Options options;
  options.kernels = metrale::host::kernel_tables();
  const auto backend = METRALE_TRY(metrale::host::create(options));
  const auto model = METRALE_TRY(metrale::Generator::load(path, *backend));

  const metrale::GenerateRequest request{.prompt = prompt, .max_tokens = 32};
  const auto print = [](std::string_view piece) { std::fwrite(piece.data(), 1, piece.size(), stdout); };
  const metrale::Generation answer = METRALE_TRY(model->generate(request, print));
  std::printf("\n%zu tokens, %.0f a second\n", answer.ids.size(), answer.stats.decode_tokens_per_second());

  const metrale::Receipt receipt = model->unload();
  std::printf("%s", receipt.to_string().c_str());
  return receipt.clean() && !answer.ids.empty();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: example_generate MODEL PROMPT\n", stderr);
    return 2;
  }
  const Result<bool> done = generate(argv[1], argv[2]);
  if (!done) std::fprintf(stderr, "%s\n", done.error().to_string().c_str());
  return done && *done ? 0 : 1;
}
