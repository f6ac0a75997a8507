#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scripts/gpu_check.sh [PROGRAMS] [options of scripts/gpu_check.py]
# Checks the CUDA backend on this machine's GPU: kernel list, conformance, GPU tests and bench; with --peers what others reach, in
# the same run; with --sanitize the first three under compute-sanitizer's four tools. --list prints the steps, --only takes some.
# Everything goes into one JSON in docs/evidence/ (--out names another folder), and a table is printed last.
# PROGRAMS is a folder with metgpu and the GPU test programs, as the build preset gpu-programs leaves it in build/portable/gpu;
# without it they are built first, which needs a CUDA toolkit. The programs need a driver and nothing else.
. "$(dirname "$0")/common.sh"
cd "$root"

programs=
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  programs=$1
  shift
fi
case " $* " in *' -h '* | *' --help '* | *' --list '*) exec python3 scripts/gpu_check.py --programs "${programs:-none}" "$@" ;; esac
if [ -z "$programs" ]; then
  programs=build/portable/gpu
  { cmake --preset portable && cmake --build --preset gpu-programs; } >&2 ||
    fail "the programs could not be built" "mend what is said above, or name a folder that has them: scripts/gpu_check.sh FOLDER"
fi
[ -x "$programs/metgpu" ] ||
  fail "$programs has no metgpu that can be run" "cmake --preset portable && cmake --build --preset gpu-programs"
# Tests and bench also run SmolLM2 where it was fetched, or METRALE_SMOLLM2_GGUF names it.
model=${METRALE_SMOLLM2_GGUF:-$(find build/models -maxdepth 1 -name 'SmolLM2-*.gguf' 2>/dev/null | head -n 1)}
if [ -n "$model" ]; then
  export METRALE_SMOLLM2_GGUF=$model
  set -- --model "$model" "$@"
fi
exec python3 scripts/gpu_check.py --programs "$programs" "$@"
