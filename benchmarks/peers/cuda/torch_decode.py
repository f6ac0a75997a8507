#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decode with transformers and torch.compile: the shapes of metgpu bench, random bf16 weights, one sequence, static cache, greedy.

    python3 torch_decode.py                                   # both shapes, reduce-overhead and max-autotune
    python3 torch_decode.py llama-8b:max-autotune --timeout 420

Prints a JSON line for each. Every run is a process of its own that is ended after --timeout seconds, since a compilation with
max-autotune can take minutes. Times are of the device, by events around a step, and of the host with its wait for each token.
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import time

SHAPES = {
    "smollm2-135m": dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                         num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True),
    "llama-8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                     num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False),
}
MODES = ("eager", "reduce-overhead", "max-autotune")
WARM_UP_STEPS = 8


def median(values):
    values = sorted(values)
    return values[len(values) // 2]


def make_model(shape):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(max_position_embeddings=8192, rms_norm_eps=1e-5, **SHAPES[shape])
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    held = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    weight_bytes = sum(held.values())
    if not config.tie_word_embeddings:  # of an embedding that is not also the head, one row is read
        weight_bytes -= model.get_input_embeddings().weight.numel() * 2
    return model, config, weight_bytes


def measure(shape, mode, context, steps):
    import torch
    from transformers import StaticCache
    model, config, weight_bytes = make_model(shape)
    if mode == "max-autotune":
        torch._inductor.config.coordinate_descent_tuning = True
    step_model = model.forward if mode == "eager" else torch.compile(model.forward, mode=mode, fullgraph=True)
    cache = StaticCache(config=config, max_cache_len=context + WARM_UP_STEPS + steps)
    ids = torch.randint(0, config.vocab_size, (1, context), device="cuda")
    device_seconds, host_seconds = [], []
    with torch.inference_mode():
        position = torch.arange(context, device="cuda")
        logits = model(ids, past_key_values=cache, cache_position=position, position_ids=position[None], use_cache=True).logits
        token = logits[:, -1:].argmax(-1)
        position = torch.tensor([context], device="cuda")
        begin = time.perf_counter()
        for i in range(WARM_UP_STEPS + steps):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if i == WARM_UP_STEPS:
                compile_seconds = time.perf_counter() - begin
            torch.cuda.synchronize()
            at = time.perf_counter()
            start.record()
            out = step_model(token.clone(), past_key_values=cache, cache_position=position, position_ids=position[None],
                             use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            end.record()
            torch.cuda.synchronize()
            if i >= WARM_UP_STEPS:
                host_seconds.append(time.perf_counter() - at)
                device_seconds.append(start.elapsed_time(end) / 1e3)
            position = position + 1
    host, device = median(host_seconds), median(device_seconds)
    return {"what": f"transformers {shape}", "mode": mode, "context": context, "steps": steps, "tokens_per_second": 1 / host,
            "host_ms": host * 1e3, "device_ms": device * 1e3, "weight_bytes": weight_bytes,
            "weight_gb_per_second": weight_bytes / host / 1e9, "compile_seconds": compile_seconds,
            "compile_cache_kept": "TORCHINDUCTOR_CACHE_DIR" in os.environ,
            "torch": torch.__version__, "device": torch.cuda.get_device_name()}


def run_alone(name, options):
    """The run in a process group of its own, so that compilers it started end with it."""
    command = [sys.executable, os.path.abspath(__file__), name, "--alone", "--context", str(options.context), "--steps",
               str(options.steps)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=options.timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return {"what": name, "failed": f"not done after {options.timeout} s; raise --timeout"}
    lines = out.strip().splitlines()
    if process.returncode != 0 or not lines:
        return {"what": name, "failed": (err.strip().splitlines() or ["no output"])[-1][:400]}
    return json.loads(lines[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="SHAPE:MODE, of " + ", ".join(SHAPES) + " and " + ", ".join(MODES))
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each run (default 300)")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    runs = options.runs or [f"{shape}:{mode}" for shape in SHAPES for mode in MODES[1:]]
    for name in runs:
        shape, _, mode = name.partition(":")
        if shape not in SHAPES or mode not in MODES:
            parser.error(f"'{name}' is no SHAPE:MODE")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as an exception, so that a run ends with this program
    failed = False
    for name in runs:
        shape, _, mode = name.partition(":")
        result = measure(shape, mode, options.context, options.steps) if options.alone else run_alone(name, options)
        failed = failed or "failed" in result
        print(json.dumps(result), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
