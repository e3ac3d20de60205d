"""What the backend adds to compiling a 48-layer model: transformers' Qwen4Exp, small widths, one graph.

    python benchmarks/compile_time.py --out compile_time.json           # PLE in 1 and in 36 of the 48 layers
    python benchmarks/compile_time.py --ple-layers 1 --repeats 1        # a shorter run

Each compilation has a process and empty caches of its own; stock Inductor and ours take turns, both on the whole-graph
form. Seconds of the first call, medians; "passes" is the time in this package's passes, probing included.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from examples.quickstart import TINY
from ple_compile import pipeline, whole_graph
from ple_compile.measuring.timing import environment, markdown

LAYERS, TOKENS = 48, 64


def build(ple_layers: int, device: str) -> Qwen4ExpForCausalLM:
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    config = Qwen4ExpTextConfig(
        **TINY,
        num_hidden_layers=LAYERS,
        ple_layer_ids=list(range(2, 2 + ple_layers)),
        indexer_kv_heads=1,
        hc_count=4,
        eos_token_id=3,
        rope_parameters=rope,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen4ExpForCausalLM(config).eval().to(torch.bfloat16 if device == "cuda" else torch.float32)


def timed(function: Callable, seconds: list[float]) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    return call


@torch.no_grad()
def compile_once(backend: str, ple_layers: int, device: str) -> dict[str, float]:
    model, passes = build(ple_layers, device), []
    pipeline.FusePass.__call__ = timed(pipeline.FusePass.__call__, passes)  # type: ignore[method-assign]
    whole_graph.apply(model)
    step = torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=False)
    tokens = torch.randint(4, 200, (1, TOKENS), device=device)
    start = time.perf_counter()
    step(tokens, use_cache=False)
    return {"seconds": time.perf_counter() - start, "passes": sum(passes)}


def in_a_process(backend: str, ple_layers: int, device: str) -> dict[str, float]:
    """`compile_once` with empty caches."""
    with tempfile.TemporaryDirectory() as caches:
        folders = {name: f"{caches}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        command = [sys.executable, __file__, "--only", backend, "--ple-layers", str(ple_layers), "--device", device]
        done = subprocess.run(command, env={**os.environ, **folders}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(ple_layers: int, device: str, repeats: int) -> dict[str, Any]:
    found: dict[str, list[dict]] = {"inductor": [], "ple": []}
    for _ in range(repeats):
        for backend, results in found.items():
            results.append(in_a_process(backend, ple_layers, device))
            print(backend, results[-1], file=sys.stderr, flush=True)
    stock, ours = (statistics.median(r["seconds"] for r in found[backend]) for backend in ("inductor", "ple"))
    passes = statistics.median(r["passes"] for r in found["ple"])
    row = {"PLE layers": ple_layers, "stock, s": stock, "ours, s": ours, "passes, s": passes}
    return {**row, "ours / stock": round(ours / stock, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ple-layers", type=int, nargs="+", default=[1, 36])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("compile_time.json"))
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(compile_once(options.only, options.ple_layers[0], options.device)))
        return
    rows = [measure(ple_layers, options.device, options.repeats) for ple_layers in options.ple_layers]
    report = {"environment": environment(options.device), "compile time": rows}
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
