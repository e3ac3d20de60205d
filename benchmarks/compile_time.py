"""What the backend adds to compiling a 48-layer model: transformers' Qwen4Exp, small widths, one graph.

    python benchmarks/compile_time.py --out compile_time.json           # PLE in 1 and in 36 of the 48 layers
    python benchmarks/compile_time.py --ple-layers 1 --repeats 1        # a shorter run
    python benchmarks/compile_time.py --passes-only --device cpu        # no code is generated

Each compilation has a process and empty caches of its own; stock Inductor and ours take turns, both on the whole-graph
form, after a small function, so that what Inductor sets up once is not counted. Seconds of the first call, medians;
"passes" is the time in this package's passes, probing included, and "before" what Dynamo and AOTAutograd take until
then.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.quickstart import TINY
from ple_compile import pipeline, whole_graph
from ple_compile.measuring.timing import environment, markdown

LAYERS, TOKENS = 48, 64


def config_of(num_ple_layers: int) -> Qwen4ExpTextConfig:
    """PLE in the first layers that may have it: those with linear attention, three of four."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    linear = [number for number in range(1, LAYERS + 1) if number % 4]
    if not 1 <= num_ple_layers <= len(linear):
        raise SystemExit(f"--ple-layers {num_ple_layers}: 1 to {len(linear)} of {LAYERS} layers can have PLE")
    return Qwen4ExpTextConfig(
        **TINY,
        num_hidden_layers=LAYERS,
        ple_layer_ids=linear[:num_ple_layers],
        indexer_kv_heads=1,
        hc_count=4,
        eos_token_id=3,
        rope_parameters=rope,
    )


def build(num_ple_layers: int, device: str) -> Qwen4ExpForCausalLM:
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen4ExpForCausalLM(config_of(num_ple_layers)).eval()
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32)


class PassesDone(Exception):
    """Ends a compilation of which only the passes are wanted."""


@dataclass
class Clock:
    """Times `run`, from `started` on."""

    run: Callable
    passes_only: bool
    started: float = 0.0
    before: float = 0.0
    passes: float = 0.0

    def __call__(self, *args: Any) -> None:
        entered = time.perf_counter()
        self.run(*args)
        self.before, self.passes = entered - self.started, time.perf_counter() - entered
        if self.passes_only:
            raise PassesDone


@torch.no_grad()
def compile_once(backend: str, ple_layers: int, device: str, passes_only: bool) -> dict[str, float]:
    torch.compile(torch.exp)(torch.ones(8, device=device))
    model, clock = build(ple_layers, device), Clock(pipeline.FusePass.__call__, passes_only)
    pipeline.FusePass.__call__ = lambda *args: clock(*args)  # type: ignore[method-assign]
    whole_graph.apply(model)
    step = torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=False)
    tokens = torch.randint(4, 200, (1, TOKENS), device=device)
    clock.started = time.perf_counter()
    try:
        step(tokens, use_cache=False)
    except torch._dynamo.exc.BackendCompilerFailed as failure:
        if not isinstance(failure.inner_exception, PassesDone):
            raise
    return {"seconds": time.perf_counter() - clock.started, "before": clock.before, "passes": clock.passes}


def in_a_process(options: argparse.Namespace, backend: str, ple_layers: int) -> dict[str, float]:
    """`compile_once` with empty caches."""
    command = [sys.executable, __file__, "--only", backend, "--ple-layers", str(ple_layers), "--device", options.device]
    with tempfile.TemporaryDirectory() as caches:
        folders = {name: f"{caches}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        done = subprocess.run(
            command + ["--passes-only"] * options.passes_only,
            env={**os.environ, **folders},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def measure(options: argparse.Namespace, ple_layers: int) -> dict[str, Any]:
    found: dict[str, list[dict]] = {"ple": []} if options.passes_only else {"inductor": [], "ple": []}
    for _ in range(options.repeats):
        for backend, results in found.items():
            results.append(in_a_process(options, backend, ple_layers))
            print(backend, results[-1], file=sys.stderr, flush=True)
    before, passes = (statistics.median(r[part] for r in found["ple"]) for part in ("before", "passes"))
    row = {"layers": LAYERS, "PLE layers": ple_layers, "before, s": before, "passes, s": passes}
    if options.passes_only:
        return row
    stock, ours = (statistics.median(r["seconds"] for r in results) for results in found.values())
    return {**row, "stock, s": stock, "ours, s": ours, "ours / stock": round(ours / stock, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ple-layers", type=int, nargs="+", default=[1, 36])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--passes-only", action="store_true", help="stop before any code is generated")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("compile_time.json"))
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(compile_once(options.only, options.ple_layers[0], options.device, options.passes_only)))
        return
    rows = [measure(options, ple_layers) for ple_layers in options.ple_layers]
    report = {"environment": environment(options.device), "compile time": rows}
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
