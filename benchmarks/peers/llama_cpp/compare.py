#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decode and prefill of one GGUF file by metgpu and by llama.cpp: same file, threads, machine and run, alternating.

usage: compare.py [--model F] [--metgpu P] [--llama-bin DIR] [--threads 2] [--rounds 5] [--tokens 128] [--prompt 512] [--json F]

llama.cpp is what scripts/reference builds (GGML_NATIVE; DIR is the folder it prints). It is measured by its own llama-bench,
metgpu by `generate --json`: prefill is a prompt of exactly --prompt tokens, decode is --tokens tokens after a prompt of a few.
Medians of --rounds runs, each after a warm-up inside the process (llama-bench) or after one unmeasured process (metgpu). Programs
are bound to the first --threads cores that this process may use. Exit code 1 if a ratio is below --require-decode or
--require-prefill.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def run(command, cores, environment=None):
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", env={**os.environ, **(environment or {})},
                            preexec_fn=lambda: os.sched_setaffinity(0, cores))
    if result.returncode != 0:
        sys.exit(f"compare: {' '.join(command[:2])} ended with {result.returncode}: {result.stderr.strip()[-400:]}")
    return result


class Ours:
    def __init__(self, args, cores):
        self.args, self.cores = args, cores
        self.environment = {"METRALE_HOST_THREADS": str(args.threads)}

    def generate(self, prompt, tokens):
        command = [self.args.metgpu, "generate", "--backend", "host", "--model", self.args.model, "--json",
                   "--max-tokens", str(tokens), "--prompt", prompt]
        return json.loads(run(command, self.cores, self.environment).stdout)

    def prompt_of(self, tokens):
        """A text of exactly so many tokens: words are added or dropped until the tokenizer agrees."""
        words = ["river", "stone", "garden", "morning", "letter", "window", "silver", "orange", "market", "winter", "simple",
                 "planet"]
        count = tokens
        for _ in range(20):
            text = " ".join(words[(i * 7 + i // 5) % len(words)] for i in range(count))
            got = self.generate(text, 1)["prompt_tokens"]
            if got == tokens:
                return text
            count += tokens - got
        sys.exit(f"compare: no prompt of {tokens} tokens was found")

    def measure(self, long_prompt):
        prefill = self.generate(long_prompt, 1)
        decode = self.generate("Once upon a time, in a village by the sea, there lived", self.args.tokens + 1)
        if decode["generated_tokens"] < self.args.tokens:
            print(f"compare: metgpu stopped after {decode['generated_tokens']} tokens", file=sys.stderr)
        return {"prefill": prefill["prefill_tokens_per_second"], "decode": decode["decode_tokens_per_second"],
                "peak_bytes": max(prefill["peak_resident_bytes"], decode["peak_resident_bytes"]), "kv_bytes": decode["kv_bytes"]}


class Theirs:
    def __init__(self, args, cores):
        self.args, self.cores = args, cores

    def measure(self):
        command = [os.path.join(self.args.llama_bin, "llama-bench"), "-m", self.args.model, "-t", str(self.args.threads), "-p",
                   str(self.args.prompt), "-n", str(self.args.tokens), "-r", "1", "-o", "json"]
        out = {}
        for test in json.loads(run(command, self.cores).stdout):
            out["prefill" if test["n_prompt"] else "decode"] = test["avg_ts"]
            self.about = {key: test[key] for key in ("build_commit", "build_number", "backends", "cpu_info") if key in test}
        return out

    def facts(self):
        """Build flags from its cache, and what it says of the processor and of its buffers when it loads the model."""
        facts = dict(self.about)
        cache = os.path.join(os.path.dirname(self.args.llama_bin.rstrip("/")), "CMakeCache.txt")
        if os.path.exists(cache):
            with open(cache, encoding="utf-8") as file:
                wanted = r"GGML_NATIVE|GGML_OPENMP|GGML_AMX\w*|CMAKE_BUILD_TYPE|CMAKE_C(?:XX)?_COMPILER|CMAKE_CXX_FLAGS"
                facts["build"] = dict(re.findall(rf"^({wanted}):\w+=(.*)$", file.read(), re.M))
        program = os.path.join(self.args.llama_bin, "llama-completion")
        if os.path.exists(program):
            command = [program, "-m", self.args.model, "-t", str(self.args.threads), "-p", "Hello", "-n", "1", "-no-cnv", "-v"]
            text = run(command, self.cores).stderr
            found = re.findall(r"system_info: (.*)", text)
            facts["system_info"] = found[0].strip() if found else None
            buffers = re.findall(r"(\S+) model buffer size = +([\d.]+) MiB", text)
            facts["weight_buffers"] = sorted({f"{name} {size} MiB" for name, size in buffers if float(size) > 0})
        return facts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.path.join(ROOT, "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--metgpu", default=os.path.join(ROOT, "build/release/cli/metgpu"))
    parser.add_argument("--llama-bin", help="folder with llama-bench; default: what scripts/reference builds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--json", help="also write everything there")
    parser.add_argument("--require-decode", type=float, default=0.0)
    parser.add_argument("--require-prefill", type=float, default=0.0)
    args = parser.parse_args()
    if not args.llama_bin:
        built = subprocess.run([os.path.join(ROOT, "scripts/reference")], check=True, capture_output=True, text=True)
        args.llama_bin = built.stdout.strip()
    for path in (args.model, args.metgpu, os.path.join(args.llama_bin, "llama-bench")):
        if not os.path.exists(path):
            sys.exit(f"compare: {path} is not there")
    available = sorted(os.sched_getaffinity(0))
    if len(available) < args.threads:
        sys.exit(f"compare: {args.threads} threads asked, {len(available)} cores may be used")
    cores = set(available[:args.threads])

    ours, theirs = Ours(args, cores), Theirs(args, cores)
    long_prompt = ours.prompt_of(args.prompt)
    samples = {"metgpu": [], "llama.cpp": []}
    for i in range(args.rounds):  # who goes first changes, so that a drift of the machine favours neither
        for who in ("metgpu", "llama.cpp") if i % 2 == 0 else ("llama.cpp", "metgpu"):
            samples[who].append(ours.measure(long_prompt) if who == "metgpu" else theirs.measure())
    report = {"model": os.path.basename(args.model), "file_bytes": os.path.getsize(args.model), "threads": args.threads,
              "rounds": args.rounds, "llama.cpp": theirs.facts(), "samples": samples, "median": {}, "ratio": {}}
    print(f"{'':24}{'metgpu':>12}{'llama.cpp':>12}{'ratio':>8}   (tokens/s, medians of {args.rounds}, {args.threads} threads)")
    for what, name in (("decode", f"decode {args.tokens}"), ("prefill", f"prefill {args.prompt}")):
        a, b = (statistics.median(s[what] for s in samples[who]) for who in ("metgpu", "llama.cpp"))
        report["median"][what] = {"metgpu": a, "llama.cpp": b}
        report["ratio"][what] = a / b
        print(f"{name:24}{a:12.1f}{b:12.1f}{a / b:8.2f}")
    peak = max(s["peak_bytes"] for s in samples["metgpu"])
    extra = peak - report["file_bytes"] - max(s["kv_bytes"] for s in samples["metgpu"])
    report["peak_bytes"], report["peak_beyond_file_and_kv_bytes"] = peak, extra
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    print(f"metgpu peak resident {peak / 2**20:.1f} MiB: {extra / 2**20:.1f} MiB beyond file and KV cache")
    print("llama.cpp:", json.dumps(report["llama.cpp"]))
    if report["ratio"]["decode"] < args.require_decode or report["ratio"]["prefill"] < args.require_prefill:
        sys.exit("compare: below the required ratio")


if __name__ == "__main__":
    main()
