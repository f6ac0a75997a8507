# SPDX-License-Identifier: Apache-2.0
# Each of these does all its set-up on Debian 12, as root or through sudo. The work is in scripts/ and in CMakePresets.json.
export PROMPT MODEL ARGS

.PHONY: help run test lint bench portable clean
help:
	@echo 'make run       build metgpu and let SmolLM2-135M-Instruct answer  [PROMPT="…"] [MODEL=path] [ARGS="--stats"]'
	@echo 'make test      build and test: release, sanitizers, fuzzing, style  [PRESETS="release dev tsan fuzz"]'
	@echo 'make lint      all checks of style, clang-tidy among them'
	@echo 'make bench     build and run the benchmarks  [FILTER=regex]'
	@echo 'make portable  one stripped metgpu for other machines, in build/portable/'
	@echo 'make clean     remove what was built; the model stays'

run:
	@scripts/run

test:
	@scripts/test $(PRESETS)

lint:
	@scripts/setup all
	@scripts/lint

bench:
	@scripts/bench $(FILTER)

portable:
	@scripts/setup run
	@cmake --preset portable
	@cmake --build --preset portable --target metgpu

clean:
	@find build -mindepth 1 -maxdepth 1 ! -name models ! -name reference -exec rm -rf {} + 2>/dev/null || true
