# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts beside it; sourced, never run. Progress and failures go to stderr: stdout is for results.
set -euo pipefail
# shellcheck disable=SC2034  # used by the scripts that source this
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "metrale: $*" >&2; }
# fail WHAT HOW: what failed, and how to go on.
fail() {
  say "$1"
  [ $# -lt 2 ] || say "to go on: $2"
  exit 1
}

# work_in PARENT: makes a folder for half-done work in PARENT; it goes, with whatever still writes to it, however the script ends.
# One that a killed script left is removed.
work_in() {
  local left
  for left in "$1"/partial.*; do
    [ ! -d "$left" ] || kill -0 "${left##*.}" 2>/dev/null || rm -rf "$left"
  done
  partial=$1/partial.$$
  trap end_work EXIT
  trap 'exit 130' INT TERM HUP
  mkdir -p "$partial"
}
end_work() {
  [ -z "${fetch_pid:-}" ] || kill "$fetch_pid" 2>/dev/null || true
  [ -z "${fetch_pid:-}" ] || wait "$fetch_pid" 2>/dev/null || true
  rm -rf "$partial"
}

# fetch_pinned REQUIREMENTS LABEL MEGABYTES: downloads the one file that REQUIREMENTS pins into the work folder, hash checked, with
# a progress line. Nothing is installed. Non-zero where it failed, after saying why.
fetch_pinned() {
  local requirements=$1 label=$2 megabytes=$3 log=$partial/pip.log done_mb status=0
  command -v pip3 >/dev/null || { say "$label: pip3 is missing; scripts/setup installs it (python3-pip)"; return 1; }
  # pip unpacks and moves inside TMPDIR: kept in the work folder, so that an interrupted download leaves nothing elsewhere.
  mkdir -p "$partial/tmp"
  TMPDIR=$partial/tmp pip3 download --disable-pip-version-check --no-cache-dir --progress-bar off --retries 2 --timeout 30 \
    --no-deps --require-hashes --dest "$partial" --requirement "$requirements" >"$log" 2>&1 &
  fetch_pid=$!
  while kill -0 "$fetch_pid" 2>/dev/null; do
    done_mb=$(($(du -sk "$partial" 2>/dev/null | cut -f1) / 1000))
    [ "$done_mb" -le "$megabytes" ] || done_mb=$megabytes  # pip unpacks what it has downloaded, to read its name
    progress "$label: downloading, $done_mb of $megabytes MB"
    sleep 0.5
  done
  wait "$fetch_pid" || status=$?
  fetch_pid=
  progress_end
  rm -rf "$partial/tmp"
  if [ $status -ne 0 ] && grep -q '^WARNING: Retrying' "$log"; then
    say "$label: the download failed: no package index answered (is there a network, or a proxy that pip must be told of?)"
  elif [ $status -ne 0 ]; then
    say "$label: the download failed; pip says: $(grep -iE '^ *error' "$log" | tail -n 1 | cut -c1-300)"
  fi
  return $status
}

# progress TEXT: one line, rewritten on a terminal; elsewhere a line each ten seconds.
progress_last=-10
progress() {
  if [ -t 2 ]; then
    printf '\rmetrale: %s\033[K' "$1" >&2
  elif [ $((SECONDS - progress_last)) -ge 10 ]; then
    progress_last=$SECONDS
    say "$1"
  fi
}
progress_end() { [ ! -t 2 ] || printf '\r\033[K' >&2; }
