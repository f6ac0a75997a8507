# SPDX-License-Identifier: Apache-2.0
"""The steps of scripts/gpu_check.py, in their order, and how the output of each is read.

A reader gives a line about the step and what is wrong with its output, if something is. An exit status of 0 is not enough: a step
that ran nothing, or that names no figure, has failed."""
import json
import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks/peers/cuda"

SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZER_FAILED = 86  # an exit status of no program here

# Conformance cases that touch device memory by kernels and copies. Left out are faults, whose illegal accesses are meant, and what
# tests time, threads or the host alone.
CASES = "^(Alloc|Arena|Copy|CopyBatch|CopyBounds|CopyRectangle|Graphs|Kernels|Launch|Memset|OpCaches|Pool|Redzones)[.]"
# Of those, under initcheck: what is about kernels. The others copy memory that nobody wrote, which they may; and a few of Graphs,
# Launch and OpCaches hold a stream back with a gate and look at calls that return at once, where initcheck waits for the device.
KERNEL_CASES = ("^(Kernels|Memset)[.]"
                "|^Graphs[.](Are|Destroy|KeepThe|LaunchOn|LetGo|MayBe|Outlive|Owner|ReplayAs|ReplayTogether|Synchronize)"
                "|^Launch[.](ByValue|Carries|Clusters|Computes|Cooperative|Debug|Dependent|Does|Every|Gives|Grids|Null)"
                "|^Launch[.](RawFormRefuses|RawFormTakes|Runs|Scalars|SmCount|Takes|Truncated|Zero)"
                "|^OpCaches[.](Forget|Outgrown|Refuse|Release|Remember|ScratchIs|ScratchOf|Sweep)")
# Of gpu_decoder_test: not what runs a model for long.
MODEL_TESTS = "-*SmolLm2*:*TwoHundredTokens*:*HostDoes*"
# Each kernel of a decoder, in chunks, in single steps and in the captured step, in both precisions.
FEW_MODEL_TESTS = "*OneWaitAndOneReplay*:*FastLogitsAreClose*:*ExactLogitsAreTheGolden*"
# Forty tokens of four layers.
ONE_KERNEL_TESTS = "*GivesTheLogitsOfTheHost*"
# Programs that a tool does not see, and why. For every tool, or for one.
UNSANITIZED = {
    "gpu_lifecycle_test": "it plants faults, and its cycles run what gpu_decoder_test runs",
    "racecheck-one_kernel_test": "it takes the order of a ring's barriers, and one through device memory, for none: so it does in "
                                 "tests/gpu/racecheck_probe.cu",
    "racecheck-gpu_decoder_test": "minutes, since kernels in clusters are slowest there; the parity programs launch each of them",
}
FEW = {"METRALE_TEST_FEW": "1"}

PEER_SHAPES = ("smollm2-135m", "llama-8b")
PEER_MODES = ("reduce-overhead", "max-autotune")

# What bench has to have a figure of, by suite.
FIGURES = {
    "launch": ("launch of 8 arguments",),
    "alloc": ("alloc . free, 1 MiB", "alloc . free, .* held at a time", "alloc_async .* 1 thread", "alloc_async .* 4 threads"),
    "copy": ("gather .* one call", "gather .* pageable"),
    "graph": ("replay of", "dependent launch"),
    "gemv": ("1 row x 4096x4096",),
    "gemm": ("product with a cached plan", "8192 rows x 8192x8192", "2048 rows x 4096x4096, block-scaled FP8", "on two streams"),
    "grouped": ("64 experts, 4096 tokens, top-8, 2048->768 bf16: TFLOP/s",),
    "attention": ("decode, batch 64, .* automatic: bytes of K and V", "prefill, 4096 tokens causal, .* packed"),
    "collective": ("all-reduce .* world of one",),
    "decode": ("read-only sweep", "llama-8b, bf16, context", "smollm2-135m, bf16, context", "hybrid-4b, bf16: bytes a token"),
}


class Step:
    def __init__(self, name, command, limit, read, result=None, environment=None, keep=(), lines=False, reduced=None, beside=False):
        self.name, self.command, self.limit, self.read = name, command, limit, read
        self.result = result  # the JSON file that the command writes
        self.environment = environment or {}
        self.keep = keep  # further files to lay beside the JSON
        self.lines = lines  # whether the command prints its result, a JSON object a line
        self.reduced = reduced  # what was left out, and why
        self.beside = beside  # whether other steps may run at the same time


# ---- readers ----

def last_line(output):
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip()[:100] if lines else "no output"


def read_info(output, _):
    lines = len(output.splitlines())
    return f"{lines} lines", None if lines else "it says nothing"


def read_kernels(output, _):
    at = output.find("{")
    if at < 0:
        return last_line(output), "no JSON"
    report = json.loads(output[at:])
    summary = f"{report['resolved']} resolved, {report['unresolved']} unresolved"
    return summary, None if report["resolved"] and not report["unresolved"] else "not every kernel is there"


def read_check(output, result):
    lines = re.findall(r"^\d+ passed, \d+ failed.*$", output, re.MULTILINE)
    if not lines or result is None:
        return last_line(output), "no closing line" if not lines else "no JSON"
    passed = int(lines[-1].split()[0])
    return lines[-1], None if passed else "no case ran"


def read_gtest(output, result):
    if result is None:
        return last_line(output), "no JSON"
    cases = [(suite["name"] + "." + case["name"], case) for suite in result["testsuites"] for case in suite["testsuite"]
             if case["status"] == "RUN"]
    skipped = [name for name, case in cases if case["result"] == "SKIPPED"]
    failed = [name for name, case in cases if case.get("failures")]
    passed = len(cases) - len(skipped) - len(failed)
    summary = f"{passed} of {len(cases)} passed"
    summary += f", failed: {', '.join(failed)}" if failed else ""
    summary += f", skipped: {', '.join(skipped)}" if skipped else ""
    return summary, None if passed else "no test ran"


def figures_missing(result, suites):
    rows = [row for row in result["rows"] if isinstance(row.get("figure"), (int, float))]
    for suite in suites:
        for pattern in FIGURES[suite]:
            if not any(re.search(pattern, row["name"]) for row in rows):
                yield f"{suite}: {pattern}"


def read_bench(suites):
    def read(output, result):
        if result is None:
            return last_line(output), "no JSON"
        status = [row["status"] for row in result["rows"]]
        summary = f"{status.count('goal')} at the goal, {status.count('met')} at the minimum, {status.count('missed')} missed"
        if result.get("failures"):
            summary += f", {len(result['failures'])} failed"
        missing = list(figures_missing(result, suites))
        return summary, f"no figure of {'; '.join(missing)}" if missing else None
    return read


FINDING = re.compile("=+ (Error|Warning|Invalid|Uninitialized|Host API|Potential|Race|Barrier|Program hit|Leaked|.* hazard)")


def findings(output):
    """What compute-sanitizer found: each kind of finding at each place, and how often."""
    found = {}
    lines = output.splitlines()
    for number, line in enumerate(lines):
        if not FINDING.match(line) or "SUMMARY" in line:
            continue
        words = re.sub(r"0x[0-9a-f]+", "…", line.strip("= "))
        place = next((re.sub(r" ?\[0x[0-9a-f]+\]|\+0x[0-9a-f]+", "", near.strip("= ")) for near in lines[number:number + 8]
                      if re.search(r"=+ +(at .* in |Host Frame: cu)", near)), "")
        key = f"{words} {place}".strip()
        found[key] = found.get(key, 0) + 1
    return found


def read_sanitizer(output, _):
    lines = re.findall(r"^=+ +((?:ERROR|RACECHECK) SUMMARY.*)$", output, re.MULTILINE)
    ran = re.findall(r"^\[  PASSED  \] (\d+) test|^(\d+) passed, 0 failed", output, re.MULTILINE)
    count = sum(int(one or other) for one, other in ran)
    if not lines:
        return last_line(output), "no summary of compute-sanitizer"
    summary = f"{lines[-1]}; {count} passed"
    clean = re.search(r"SUMMARY: 0 (errors|hazards)", lines[-1])
    return summary, "it found something" if not clean else None if count else "nothing passed"


def read_lines(output, result):
    rows = result or []
    failed = [f"{row.get('what')}: {row['failed']}" for row in rows if "failed" in row]
    figures = [row for row in rows if "median" in row or "tokens_per_second" in row]
    if failed:
        return "; ".join(failed)[:200], "it failed"
    if not figures:
        return last_line(output), "no figure"
    rates = [f"{row['tokens_per_second']:.1f} tokens/s" for row in figures if "tokens_per_second" in row]
    return ", ".join(rates) or f"{len(figures)} figures", None


# ---- steps ----

def tool(given, name):
    """A program of CUDA's toolkit: as given, on the path, or where the toolkit usually is."""
    usual = Path("/usr/local/cuda/bin") / name
    return given or shutil.which(name) or (str(usual) if usual.exists() else name)


def tests_of(program, few):
    """A GoogleTest filter; None for all tests."""
    if program == "one_kernel_test":
        return ONE_KERNEL_TESTS
    return (FEW_MODEL_TESTS if few else MODEL_TESTS) if program == "gpu_decoder_test" else None


def sanitizer_steps(options, metgpu, tests, required):
    program = tool(options.sanitizer, "compute-sanitizer")
    for check in SANITIZERS:
        words = [program, "--tool", check, "--error-exitcode", str(SANITIZER_FAILED), "--target-processes", "all",
                 "--print-limit", "50"]
        if check == "memcheck":
            # The driver is asked for what modules may lack, and refuses it. After a finding the rest is to be seen too.
            words += ["--report-api-errors", "no", "--destroy-on-device-error", "kernel"]
        few = options.sanitize_few or check != "memcheck"
        cases, environment = options.sanitize_filter or CASES, dict(required)
        reduced = f"conformance cases {cases}: not those that plant faults or test time, threads or the host alone"
        if check == "initcheck":
            cases = options.sanitize_filter or KERNEL_CASES
            environment["METRALE_TEST_NO_BATCHED_COPIES"] = "1"
            reduced = f"conformance cases {cases}: the others copy memory that nobody wrote, which they may, or look at calls " \
                      "that return at once where initcheck waits for the device"
        yield Step(f"{check}-check", words + [metgpu, "check", "--backend", "cuda", "--filter", cases], 120, read_sanitizer,
                   environment=environment, reduced=reduced)  # alone: its many short waits would each wait for the others' kernels
        for test in [test for test in tests if not {test.name, f"{check}-{test.name}"} & set(UNSANITIZED)]:
            environment, arguments, reduced = dict(required), [], None
            if check == "initcheck":
                environment["METRALE_TEST_NO_BATCHED_COPIES"] = "1"
            if "parity" in test.name:
                if few:
                    environment |= FEW
                    reduced = "METRALE_TEST_FEW: the first case of each kernel, type and way to go about it"
            elif chosen := options.sanitize_tests or tests_of(test.name, few):
                arguments, reduced = [f"--gtest_filter={chosen}"], f"tests {chosen}"
            yield Step(f"{check}-{test.name}", words + [test] + arguments, 150, read_sanitizer, environment=environment,
                       reduced=reduced, beside=True)


def peer_steps(options, folder):
    nvcc = tool(options.nvcc, "nvcc")
    libraries = {"raw_limits": "-lcuda", "cublaslt_graph": "-lcuda -lcublasLt"}
    for name, linked in libraries.items():
        built = folder / name
        line = f"{nvcc} -O3 -std=c++17 -arch=native {PEERS / name}.cu -o {built} {linked} && {built}"
        yield Step(f"peer-{name}", ["sh", "-c", line], 120, read_lines, lines=True)
    yield Step("peer-sdpa", [options.python, PEERS / "torch_attention.py"], 120, read_lines, lines=True)
    for shape in PEER_SHAPES:
        for mode in PEER_MODES:
            words = [options.python, PEERS / "torch_decode.py", f"{shape}:{mode}", "--timeout", str(options.peer_limit)]
            yield Step(f"peer-torch-{shape}-{mode}", words, options.peer_limit + 20, read_lines, lines=True)


def steps(options, folder):
    metgpu = options.programs / "metgpu"
    required = {"METRALE_REQUIRE_BACKENDS": "cuda"}
    tests = sorted(path for path in options.programs.glob("*_test") if os.access(path, os.X_OK))
    yield Step("info", [metgpu, "info"], 60, read_info)
    yield Step("kernels", [metgpu, "kernels", "--backend", "cuda", "--check"], 60, read_kernels)
    yield Step("check", [metgpu, "check", "--backend", "cuda", "--json", folder / "check.json"], 300, read_check,
               folder / "check.json", required)
    for test in tests:
        result = folder / f"{test.name}.json"
        yield Step(test.name, [test, f"--gtest_output=json:{result}", "--gtest_brief=1"], 240, read_gtest, result, required)
    bench_json = folder / "bench.json"
    words = [metgpu, "bench", "--json", bench_json, "--html", folder / "bench.html"]
    words += ["--model", options.model] if options.model else []
    words += options.bench_arguments.split()
    suites = [suite for list_of in re.findall(r"--suite[ =]([\w,]+)", options.bench_arguments) for suite in list_of.split(",")]
    yield Step("bench", words, 420, read_bench([suite for suite in suites if suite in FIGURES] or list(FIGURES)), bench_json,
               keep=(folder / "bench.html",))
    if options.peers:
        yield from peer_steps(options, folder)
    if options.sanitize:
        yield from sanitizer_steps(options, metgpu, tests, required)


# ---- what the figures say together ----

def ratios(report):
    """Ours over each peer, of the figures of one run."""
    steps_by_name = {step["name"]: step for step in report["steps"]}
    rows = ((steps_by_name.get("bench") or {}).get("result") or {}).get("rows", [])
    ours = {row["name"]: row["figure"] for row in rows if isinstance(row.get("figure"), (int, float))}
    for name, step in steps_by_name.items():
        for row in (step.get("result") or []) if name.startswith("peer-") else []:
            shape = next((shape for shape in PEER_SHAPES if shape in str(row.get("what"))), None)
            mine = ours.get(f"{shape}, bf16, context {row.get('context')}") if "tokens_per_second" in row else None
            theirs = row.get("tokens_per_second")
            what = f"decode, {row.get('what')}, {row.get('mode')}"
            if row.get("what") == "cuBLASLt graph, 8B Llama shape, matrix products alone":
                mine, theirs, what = ours.get("llama-8b, bf16, context 512"), row["median"], f"decode, {row['what']}"
            if row.get("what") == "sdpa, fastest":  # times: the less the better
                mine = ours.get(f"prefill, {row['tokens']} tokens causal, 32/8 heads of 128, packed")
                if mine:
                    yield {"what": f"prefill, {row['tokens']} tokens, SDPA's {row['backend']}", "unit": "us", "ours": mine,
                           "peer": row["us"], "ratio": row["us"] / mine}
                continue
            if mine and theirs:
                yield {"what": what, "unit": "tokens/s", "ours": mine, "peer": theirs, "ratio": mine / theirs}
