#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs what has to hold on a real GPU and writes one JSON about it. scripts/gpu_check.sh is how it is called.

Each step has its own time limit, after which all its processes are ended, and a failed step never keeps the next one from running.
A step has failed when its command fails, when it runs into its limit, and when what it was to say is not in its output. The exit
status is 1 when any step failed."""
import argparse
import concurrent.futures
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

from gpu_steps import CASES, ROOT, SANITIZERS, UNSANITIZED, findings, last_line, ratios, steps

TAIL_CHARACTERS = 6000


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


RUNNING = set()  # the children that are alive, for an interruption while several are


def run(step, folder):
    """Runs one step; what there is to say of it."""
    log = folder / f"{step.name}.log"
    start, timed_out = time.monotonic(), False
    try:
        with open(log, "wb") as output:
            child = subprocess.Popen(step.command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                     env=os.environ | step.environment, start_new_session=True)
            RUNNING.add(child)
            try:
                status = child.wait(step.limit)
            except subprocess.TimeoutExpired:
                timed_out = True
                status = end(child)
            except BaseException:
                end(child)
                raise
            finally:
                RUNNING.discard(child)
    except OSError as error:
        log.write_text(str(error))
        status = None
    text = without_paths(log.read_text(errors="replace"), folder)
    result = result_of(step, text)
    try:
        summary, problem = step.read(text, result)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        summary, problem = last_line(text), f"unreadable result: {error!r}"
    if timed_out:
        problem = f"ended after {step.limit} s"
    elif status != 0:
        problem = f"exit {status}" + (f", {problem}" if problem else "")
    done = {"name": step.name, "command": shown(step.command, folder), "environment": step.environment, "exit_code": status,
            "timed_out": timed_out, "ok": problem is None, "problem": problem, "seconds": round(time.monotonic() - start, 2),
            "limit_seconds": step.limit, "summary": summary, "reduced": step.reduced, "result": result,
            "output_tail": text[-TAIL_CHARACTERS:]}
    found = findings(text)
    return done | ({"findings": found} if found else {})


def result_of(step, text):
    """The JSON of a step: of the file that it writes, or the objects that it prints."""
    try:
        if step.lines:
            return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return json.loads(step.result.read_text()) if step.result is not None else None
    except (OSError, ValueError):
        return None


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


def write(report, path):
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps(report, indent=1) + "\n")
    unfinished.replace(path)


class Run:
    """The steps of one run, and the report that grows with them."""

    def __init__(self, options, report, path, folder):
        self.options, self.report, self.path, self.folder = options, report, path, folder
        self.start = time.monotonic()

    def step(self, step):
        options = self.options
        if options.step_limit:
            step.limit = min(step.limit, options.step_limit)
        if options.limit:
            left = int(options.limit - (time.monotonic() - self.start))
            if left < 10:
                return {"name": step.name, "command": shown(step.command, self.folder), "ok": False, "seconds": 0,
                        "exit_code": None, "problem": "not run: the time for all steps was spent", "summary": "",
                        "reduced": step.reduced}
            step.limit = min(step.limit, left)
        print(f"metrale: gpu check: {step.name}", file=sys.stderr, flush=True)
        return run(step, self.folder)

    def all(self, chosen):
        """Steps that measure, each alone and in turn; then those that may run side by side."""
        self.report["steps"] = [None] * len(chosen)
        for place, step in enumerate(chosen):
            if not step.beside:
                self.add(place, step, self.step(step))
        with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, self.options.jobs)) as pool:
            running = {pool.submit(self.step, step): (place, step) for place, step in enumerate(chosen) if step.beside}
            try:
                for future in concurrent.futures.as_completed(running):
                    self.add(*running[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in list(RUNNING):
                    end(child)
                raise

    def add(self, place, step, done):
        """Writes what is known, after each step, so that whatever ends this run leaves it."""
        self.report["steps"][place] = done
        for extra in step.keep:
            if extra.exists():
                (self.options.out / f"{self.path.stem}-{extra.name}").write_bytes(extra.read_bytes())
        write(self.report | {"steps": [step for step in self.report["steps"] if step]}, self.path)


def not_run(options, chosen):
    """What this run leaves out of the whole, in words."""
    names = {step.name for step in chosen}
    if options.only:
        yield f"all steps but {options.only}"
    if not options.model and "gpu_decoder_test" in names:
        yield "SmolLM2: no model was named; its tests are skipped, and bench has no figure of it as stored"
    if not options.peers:
        yield "peers: --peers was not given"
    if not options.sanitize:
        yield "compute-sanitizer: --sanitize was not given"
    elif any("check-" in name for name in names):
        yield from (f"compute-sanitizer, {program}: {why}" for program, why in UNSANITIZED.items())


def print_report(report):
    found = report["device"]
    print(f"\n{found.get('name') or 'no device that nvidia-smi knows'}, driver {found.get('driver_version')}, {report['date']}, "
          f"commit {report['commit']}")
    for done in report["steps"]:
        print(f"  {'ok' if done['ok'] else 'FAILED':6} {done['name']:32} {done['seconds']:7.1f} s  "
              f"{done['summary']}{'; ' + done['problem'] if done['problem'] else ''}")
    for done in report["steps"]:
        rows = done["result"]["rows"] if done["name"] == "bench" and done.get("result") else []
        judged = [row for row in rows if row.get("minimum") is not None or row.get("goal") is not None]
        if judged:
            print(f"\n  {'figure':62} {'':9} {'minimum':>9} {'goal':>9}")
        for row in judged:
            limits = [f"{row[key]:9.4g}" if row.get(key) is not None else f"{'-':>9}" for key in ("minimum", "goal")]
            print(f"  {row['name']:62} {row['figure']:9.4g} {limits[0]} {limits[1]}  {row['status']}")
    if report["ratios"]:
        print(f"\n  {'ours / peer':78} {'ours':>8} {'peer':>8} {'ratio':>6}")
    for row in report["ratios"]:
        print(f"  {row['what'] + ', ' + row['unit']:78} {row['ours']:8.1f} {row['peer']:8.1f} {row['ratio']:6.2f}")
    for title, lines in (("reduced", [f"{done['name']}: {done['reduced']}" for done in report["steps"] if done.get("reduced")]),
                         ("not run", report["not_run"])):
        if lines:
            print(f"\n  {title}:\n" + "\n".join(f"    {line}" for line in lines))
    for done in report["steps"]:
        if done["ok"]:
            continue
        for finding, count in done.get("findings", {}).items():
            print(f"\n{done['name']}: {count} x {finding}")
        if done.get("output_tail"):
            print(f"\n---- {done['name']}, its last lines ----\n" + "\n".join(done["output_tail"].splitlines()[-15:]))


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
    parser.add_argument("--sanitize-filter", help=f"conformance cases to sanitize ({CASES}; fewer under initcheck)")
    parser.add_argument("--sanitize-tests", help="GoogleTest filter of the model tests to sanitize, for those that --list prints")
    parser.add_argument("--sanitize-few", action="store_true", help="memcheck takes as few cases as the other tools")
    parser.add_argument("--jobs", type=int, default=2, help="sanitizer steps that run at the same time (%(default)s)")
    parser.add_argument("--peers", action="store_true", help="also the peers: raw limits, cuBLASLt, torch.compile")
    parser.add_argument("--peer-limit", type=int, default=240, help="seconds for each run of a PyTorch peer (%(default)s)")
    parser.add_argument("--python", default="python3", help="a Python with torch and transformers (%(default)s)")
    parser.add_argument("--nvcc", help="the compiler for the peers, if it is not on the path")
    options = parser.parse_args()
    options.programs = options.programs.resolve()

    folder = Path(tempfile.mkdtemp(prefix="metrale-gpu-check-"))
    wanted = [re.compile(re.escape(name).replace(r"\*", ".*")) for name in options.only.split(",") if name]
    chosen = [step for step in steps(options, folder) if not wanted or any(name.fullmatch(step.name) for name in wanted)]
    if options.list:
        for step in chosen:
            print(f"{step.name:32} {step.limit:4} s  {shown(step.command, folder)}")
            if step.reduced:
                print(f"{'':32}         {step.reduced}")
        folder.rmdir()
        return 0
    if not chosen:
        print(f"no step is called {options.only}; --list prints them", file=sys.stderr)
        return 2

    now = datetime.datetime.now(datetime.timezone.utc)
    built = commit(options.commit)
    report = {"date": now.strftime("%Y-%m-%dT%H:%M:%SZ"), "commit": built, "device": device(), "cores": os.cpu_count(),
              "complete": False, "not_run": list(not_run(options, chosen)), "ratios": [], "steps": []}
    name = options.name or f"gpu-check-{now.strftime('%Y%m%d-%H%M%S')}-{(built or 'unknown')[:10]}"
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.json"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as an exception, so that steps end with this program
    Run(options, report, path, folder).all(chosen)
    report |= {"complete": True, "device_after": device(), "ratios": list(ratios(report))}
    write(report, path)
    for leftover in folder.iterdir():
        leftover.unlink()
    folder.rmdir()
    print_report(report)
    print(f"\nwritten: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return 0 if all(done["ok"] for done in report["steps"]) else 1


if __name__ == "__main__":
    sys.exit(main())
