#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs what has to hold on a real GPU and writes one JSON about it. scripts/gpu_check.sh is how it is called.

Each step has its own time limit, after which all its processes are ended, and a failed step never keeps the next one from running.
The exit status is 1 when any step failed."""
import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TAIL_CHARACTERS = 6000

# Under compute-sanitizer everything is some ten to a hundred times slower, so it gets a part of the suite: what touches device
# memory by kernels and copies. Left out are Faults, whose illegal accesses are meant, and what tests time, threads or the host.
SANITIZED_CASES = "^(Alloc|Arena|Copy|CopyBatch|CopyBounds|CopyRectangle|Graphs|Kernels|Launch|Memset|OpCaches|Pool|Redzones)[.]"
# Of the GPU tests: not the planted faults, and not what runs a model for long.
SANITIZED_TESTS = "-GpuFaults.*:*Cycles*:*TenBackends*:*SmolLm2*:*TwoHundredTokens*:*HostDoes*"
# A program of which the filter leaves nothing: planted faults and a hundred cycles.
UNSANITIZED_PROGRAMS = ("gpu_lifecycle_test",)
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZER_FAILED = 86  # an exit status of no program here


class Step:
    def __init__(self, name, command, limit, result=None, environment=None, summary=None, keep=()):
        self.name, self.command, self.limit = name, command, limit
        self.result = result  # the JSON file that the command writes
        self.environment = environment or {}
        self.summary = summary or (lambda step, output, result: "")
        self.keep = keep  # further files to lay beside the JSON


def without_paths(text, folder):
    """Text as a reader elsewhere can use it: no path of this machine."""
    return text.replace(str(folder) + "/", "").replace(str(ROOT) + "/", "")


def shown(command, folder):
    """A command as a reader can repeat it."""
    words = [without_paths(str(word), folder) for word in command]
    return " ".join(f"'{word}'" if re.search(r"[\s|()^;]", word) else word for word in words)


def first_line(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return done.stdout.strip().splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None
    except (OSError, subprocess.TimeoutExpired):
        return None


def device():
    fields = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit",
              "temperature.gpu", "ecc.mode.current")
    line = first_line(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
    return dict(zip(fields, (value.strip() for value in line.split(",")))) if line else {"name": None}


def commit(given):
    if given:
        return given
    head = first_line(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    if head is None:
        return None
    return head + ("-dirty" if first_line(["git", "-C", str(ROOT), "status", "--porcelain"]) else "")


def run(step, folder):
    """Runs one step; what there is to say of it."""
    log = folder / f"{step.name}.log"
    start, timed_out = time.monotonic(), False
    try:
        with open(log, "wb") as output:
            child = subprocess.Popen(step.command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                     env=os.environ | step.environment, start_new_session=True)
            try:
                status = child.wait(step.limit)
            except subprocess.TimeoutExpired:
                timed_out = True
                status = end(child)
            except BaseException:
                end(child)
                raise
    except OSError as error:
        log.write_text(str(error))
        status = None
    text = without_paths(log.read_text(errors="replace"), folder)
    result = None
    if step.result is not None:
        try:
            result = json.loads(step.result.read_text())
        except (OSError, ValueError):
            pass
    try:
        summary = step.summary(step, text, result)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        summary = f"unreadable result: {error!r}"
    if timed_out:
        summary = f"ended after {step.limit} s; {summary}"
    return {"name": step.name, "command": shown(step.command, folder), "environment": step.environment, "exit_code": status,
            "timed_out": timed_out, "ok": status == 0 and not timed_out, "seconds": round(time.monotonic() - start, 2),
            "limit_seconds": step.limit, "summary": summary, "result": result, "output_tail": text[-TAIL_CHARACTERS:]}


def end(child):
    """Ends a step with all its processes, first politely."""
    for number, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 10)):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            pass
        try:
            return child.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    return None  # not even killed: stuck in the driver


def closing_line(_, output, __):
    lines = re.findall(r"^\d+ passed, \d+ failed.*$", output, re.MULTILINE)
    return lines[-1] if lines else "no closing line"


def gtest(_, output, result):
    if result is None:
        return last_line(_, output, result)
    ran = result["tests"] - result.get("disabled", 0)
    return f"{ran - result['failures']} of {ran} passed, " \
           f"{output.count('[  SKIPPED ]')} lines of skips"


def last_line(_, output, __):
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip()[:100] if lines else "no output"


def kernels(_, output, __):
    at = output.find("{")
    report = json.loads(output[at:]) if at >= 0 else {}
    return f"{report['resolved']} resolved, {report['unresolved']} unresolved"


def bench(_, output, result):
    if result is None:
        return last_line(_, output, result)
    status = [row["status"] for row in result["rows"]]
    return f"{status.count('goal')} at the goal, {status.count('met')} at the minimum, {status.count('missed')} missed" + \
        (f", {len(result['failures'])} failed" if result.get("failures") else "")


def sanitizer(_, output, __):
    lines = re.findall(r"^=+ +((?:ERROR|RACECHECK) SUMMARY.*)$", output, re.MULTILINE)
    return "; ".join(lines[-2:]) if lines else last_line(_, output, None)


def steps(options, folder):
    metgpu = options.programs / "metgpu"
    required = {"METRALE_REQUIRE_BACKENDS": "cuda"}
    tests = sorted(path for path in options.programs.glob("*_test") if os.access(path, os.X_OK))
    yield Step("info", [metgpu, "info"], 60, summary=lambda *_: "")
    yield Step("kernels", [metgpu, "kernels", "--backend", "cuda", "--check"], 60, summary=kernels)
    yield Step("check", [metgpu, "check", "--backend", "cuda", "--json", folder / "check.json"], 300, folder / "check.json",
               required, closing_line)
    for test in tests:
        result = folder / f"{test.name}.json"
        yield Step(test.name, [test, f"--gtest_output=json:{result}", "--gtest_brief=1"], 240, result, required, gtest)
    bench_json = folder / "bench.json"
    words = [metgpu, "bench", "--json", bench_json, "--html", folder / "bench.html"]
    words += ["--model", options.model] if options.model else []
    yield Step("bench", words + options.bench_arguments.split(), 420, bench_json, {}, bench, (folder / "bench.html",))
    if not options.sanitize:
        return
    tool = options.sanitizer or "compute-sanitizer"
    for check in SANITIZERS:
        words = [tool, "--tool", check, "--error-exitcode", str(SANITIZER_FAILED), "--target-processes", "all",
                 "--print-limit", "20"]
        if check == "memcheck":
            words += ["--report-api-errors", "no"]  # the driver is asked for what modules may lack, and refuses it
        yield Step(f"{check}-check", words + [metgpu, "check", "--backend", "cuda", "--filter", options.sanitize_filter], 300,
                   environment=required, summary=sanitizer)
        for test in [test for test in tests if test.name not in UNSANITIZED_PROGRAMS]:
            yield Step(f"{check}-{test.name}", words + [test, "--gtest_brief=1", f"--gtest_filter={options.sanitize_tests}"], 300,
                       environment=required, summary=sanitizer)


def write(report, path):
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps(report, indent=1) + "\n")
    unfinished.replace(path)


def main():
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description="Checks the CUDA backend on this machine's GPU.")
    parser.add_argument("--programs", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/evidence", help="folder of the JSON (docs/evidence)")
    parser.add_argument("--name", help="name of the JSON; by default gpu-check-<date>-<commit>")
    parser.add_argument("--only", default="", help="steps to run, comma-separated; a name with * stands for several")
    parser.add_argument("--list", action="store_true", help="print the steps and run none")
    parser.add_argument("--limit", type=int, default=0, help="seconds for all steps together; steps beyond it are not run")
    parser.add_argument("--step-limit", type=int, default=0, help="seconds for each step at most")
    parser.add_argument("--commit", help="what was built, where there is no git to ask")
    parser.add_argument("--model", help="a model that bench also measures as it is stored")
    parser.add_argument("--bench-arguments", default="", help="further arguments of metgpu bench, in one word")
    parser.add_argument("--sanitize", action="store_true", help=f"also under compute-sanitizer: {', '.join(SANITIZERS)}")
    parser.add_argument("--sanitizer", help="the compute-sanitizer program, if it is not on the path")
    parser.add_argument("--sanitize-filter", default=SANITIZED_CASES, help="conformance cases to sanitize (%(default)s)")
    parser.add_argument("--sanitize-tests", default=SANITIZED_TESTS,
                        help="GoogleTest filter of the GPU tests to sanitize (%(default)s)")
    options = parser.parse_args()
    options.programs = options.programs.resolve()

    folder = Path(tempfile.mkdtemp(prefix="metrale-gpu-check-"))
    wanted = [re.compile(re.escape(name).replace(r"\*", ".*")) for name in options.only.split(",") if name]
    chosen = [step for step in steps(options, folder) if not wanted or any(name.fullmatch(step.name) for name in wanted)]
    if options.list:
        for step in chosen:
            print(f"{step.name:24} {step.limit:4} s  {shown(step.command, folder)}")
        folder.rmdir()
        return 0
    if not chosen:
        print(f"no step is called {options.only}; --list prints them", file=sys.stderr)
        return 2

    now = datetime.datetime.now(datetime.timezone.utc)
    built = commit(options.commit)
    report = {"date": now.strftime("%Y-%m-%dT%H:%M:%SZ"), "commit": built, "device": device(), "cores": os.cpu_count(),
              "complete": False, "steps": []}
    name = options.name or f"gpu-check-{now.strftime('%Y%m%d-%H%M%S')}-{(built or 'unknown')[:10]}"
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.json"
    start = time.monotonic()
    for step in chosen:
        if options.step_limit:
            step.limit = min(step.limit, options.step_limit)
        if options.limit:
            left = int(options.limit - (time.monotonic() - start))
            if left < 10:
                report["steps"].append({"name": step.name, "command": shown(step.command, folder), "ok": False, "seconds": 0,
                                        "exit_code": None, "summary": "not run: the time for all steps was spent"})
                continue
            step.limit = min(step.limit, left)
        print(f"metrale: gpu check: {step.name}", file=sys.stderr, flush=True)
        done = run(step, folder)
        report["steps"].append(done)
        for extra in step.keep:
            if extra.exists():
                (options.out / f"{name}-{extra.name}").write_bytes(extra.read_bytes())
        write(report, path)  # after each step, so that whatever ends this run leaves what is known
    report["complete"] = True
    report["device_after"] = device()
    write(report, path)
    for leftover in folder.iterdir():
        leftover.unlink()
    folder.rmdir()

    found = report["device"]
    print(f"\n{found.get('name') or 'no device that nvidia-smi knows'}, driver {found.get('driver_version')}, {report['date']}, "
          f"commit {built}")
    for done in report["steps"]:
        print(f"  {'ok' if done['ok'] else 'FAILED':6} {done['name']:26} {done['seconds']:7.1f} s  exit {done['exit_code']!s:5} "
              f"{done['summary']}")
    for done in report["steps"]:
        if not done["ok"] and done.get("output_tail"):
            print(f"\n---- {done['name']}, its last lines ----\n" + "\n".join(done["output_tail"].splitlines()[-15:]))
    print(f"\nwritten: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return 0 if all(done["ok"] for done in report["steps"]) else 1


if __name__ == "__main__":
    sys.exit(main())
