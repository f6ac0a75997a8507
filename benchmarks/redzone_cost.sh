#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# benchmarks/redzone_cost.sh [BUILD_FOLDER]
# What red zones cost while they are off: instructions of a launch and of alloc + free, counted by valgrind, in a build as it is
# and in one that has none (METRALE_NO_REDZONES). Needs no GPU: the hooks below the face do nothing, so whatever the guards leave
# behind is as large a share as it can be. Fails where the two differ by more than 1 %.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
build=${1:-$root/build/redzone_cost}
few=1000 many=5000

build_one() {
  cmake -S "$root" -B "$build/$1" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMETRALE_BUILD_BENCHMARKS=ON -DMETRALE_BUILD_TESTS=OFF \
    -DMETRALE_BUILD_TOOL=OFF -DMETRALE_WITH_CUDA=OFF "-DCMAKE_CXX_FLAGS=$2" >"$build/$1.log" 2>&1
  cmake --build "$build/$1" --target redzone_cost >>"$build/$1.log" 2>&1 || { cat "$build/$1.log" >&2; exit 1; }
}
# Instructions of the whole program. What comes before the loop is the same for every count.
instructions() {
  valgrind --tool=cachegrind --cache-sim=no --cachegrind-out-file=/dev/null "$build/$1/benchmarks/redzone_cost" "$2" "$3" 2>&1 |
    sed -n 's/.*I *refs: *//p' | tr -d ,
}

mkdir -p "$build"
build_one with ""
build_one without -DMETRALE_NO_REDZONES
status=0
printf '%-8s %14s %14s %10s\n' call "with, off" without difference
for what in launch alloc; do
  declare -A each
  for kind in with without; do
    each[$kind]=$((($(instructions $kind $what $many) - $(instructions $kind $what $few)) * 10 / (many - few)))
  done
  permille=$(((each[with] - each[without]) * 10000 / each[without]))
  printf '%-8s %12d.%d %12d.%d %6d.%02d %%\n' $what $((each[with] / 10)) $((each[with] % 10)) $((each[without] / 10)) \
    $((each[without] % 10)) $((permille / 100)) $((permille < 0 ? -permille % 100 : permille % 100))
  [ $permille -le 100 ] && [ $permille -ge -100 ] || status=1
done
exit $status
