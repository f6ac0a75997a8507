#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Causal attention of one sequence by torch.nn.functional.scaled_dot_product_attention, each of its backends by itself: 32 query
and 8 key heads of 128, bf16, the shape of metgpu bench --suite attention.

    python3 torch_attention.py [--tokens 4096]

Prints a JSON line for each backend that takes the call, layout of memory and way to pass grouped heads, and one for the fastest.
Times are of the device: events around a graph of calls, the median of rounds in which all take turns.
"""
import argparse
import json
import time

HEADS, KV_HEADS, DIM = 32, 8, 128
CALLS = 20  # in a graph


def candidates(torch, tokens):
    """name -> function without arguments."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    attention = torch.nn.functional.scaled_dot_product_attention

    def rows(heads, layout):
        if layout == "tokens x heads":
            return torch.randn(1, tokens, heads, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        return torch.randn(1, heads, tokens, DIM, device="cuda", dtype=torch.bfloat16)

    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        for layout in ("tokens x heads", "heads x tokens"):
            for grouped in (True, False):
                q = rows(HEADS, layout)
                k, v = (rows(KV_HEADS if grouped else HEADS, layout) for _ in range(2))

                def call(q=q, k=k, v=v, grouped=grouped, which=getattr(SDPBackend, backend)):
                    with sdpa_kernel(which):
                        return attention(q, k, v, is_causal=True, enable_gqa=grouped)
                yield f"{backend}, {layout}, {'grouped' if grouped else 'repeated'} heads", call


def graph_of(torch, call):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    import torch
    torch.manual_seed(0)
    graphs, kept = {}, []
    for name, call in candidates(torch, options.tokens):
        try:
            with torch.inference_mode():
                graphs[name] = graph_of(torch, call)
            kept.append(call)  # a graph does not hold the memory of its inputs
        except (RuntimeError, TypeError) as refused:
            print(json.dumps({"what": f"sdpa, {name}", "refused": str(refused).splitlines()[0][:160]}), flush=True)
    end = time.perf_counter() + 1.2
    while time.perf_counter() < end:
        for graph in graphs.values():
            graph.replay()
        torch.cuda.synchronize()
    samples = {name: [] for name in graphs}
    for _ in range(options.rounds):
        for name, graph in graphs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(stop) * 1e3 / CALLS)
    flops = 2 * HEADS * DIM * options.tokens * (options.tokens + 1)
    medians = {name: sorted(times)[len(times) // 2] for name, times in samples.items()}
    for name, us in medians.items():
        print(json.dumps({"what": f"sdpa, {name}", "tokens": options.tokens, "us": us, "tflops": flops / us / 1e6}), flush=True)
    fastest = min(medians, key=medians.get)
    print(json.dumps({"what": "sdpa, fastest", "backend": fastest, "tokens": options.tokens, "us": medians[fastest],
                      "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}), flush=True)


if __name__ == "__main__":
    main()
