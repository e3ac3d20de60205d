"""transformers' whole Qwen4Exp at released widths, 8 layers: prompts of 1, 2,048 and 8,192 tokens, 64 decode steps.

    python benchmarks/whole_model.py --out whole_model.json                     # every variant, Markdown to stdout
    python benchmarks/whole_model.py --out whole_model.json --variants eager ple_whole

Rows of variants and prompts that were not run this time stay in the JSON. bf16, batch 1, random weights, 64 experts and
a table of 16 M rows so that it fits one GPU with room to spare. Variants:
    eager       transformers as it is, dynamic cache
    stock       torch.compile(model.forward), dynamic cache
    ple         ple_compile.compile(model): PLE layers compiled, the indexers' loop replaced; dynamic cache
    ple_whole   ple_compile.compile(model, whole_graph=True, mode="reduce-overhead"): one graph each, static cache
    whole       the whole-graph form under plain Inductor: prefill dynamic, decode "reduce-overhead", static cache
"first prefill" is the first call with a length, compilation included where one is due; prefill is the median of three
calls after it (eager, stock: one call); decode is 64 greedy steps after 8. Peak memory is what a prefill and its decode
allocate beyond weights and cache.
"""

import argparse
import gc
import inspect
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

import ple_compile
from ple_compile import whole_graph
from ple_compile.measuring.timing import environment, markdown

PROMPTS, STEPS, WARM_STEPS = (1, 2048, 8192), 64, 8
MAX_CACHE_LEN = PROMPTS[-1] + STEPS + WARM_STEPS + 8
CONFIG = dict(
    vocab_size=248_320,
    hidden_size=2560,
    num_hidden_layers=8,
    num_attention_heads=24,
    num_key_value_heads=2,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    moe_intermediate_size=640,
    shared_expert_intermediate_size=640,
    num_experts=64,
    num_experts_per_tok=10,
    norm_topk_prob=True,
    hc_count=4,
    hc_lowrank=320,
    ple_layer_ids=[2],
    ple_embed_dim=2560,
    ngram_vocab_size_base=1_000_000,
    indexer_n_heads=4,
    indexer_kv_heads=1,
    indexer_head_dim=128,
    indexer_budget=2048,
    indexer_compress_ratio=4,
    output_gate_type="sigmoid",
    eos_token_id=248_044,
    max_position_embeddings=16_384,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = modeling.Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**CONFIG)).eval()
    torch.set_default_dtype(torch.float32)
    return model


@dataclass
class Variant:
    prefill: Callable[..., Any]
    decode: Callable[..., Any]
    static: bool
    undo: Callable[[], object]
    slow: bool = False


def eager(model: Any) -> Variant:
    return Variant(model.forward, model.forward, False, lambda: None, slow=True)


def stock(model: Any) -> Variant:
    compiled = torch.compile(model.forward)
    return Variant(compiled, compiled, False, lambda: None, slow=True)


def ple(model: Any) -> Variant:
    ple_compile.compile(model)
    return Variant(model, model, False, partial(ple_compile.restore, model))


def ple_whole(model: Any) -> Variant:
    # The prefill's length is dynamic: a recorded CUDA graph per prompt length would not pay.
    options = {"triton.cudagraph_skip_dynamic_graphs": True}
    ple_compile.compile(model, whole_graph=True, mode="reduce-overhead", inductor=options)
    return Variant(model, model, True, partial(ple_compile.restore, model))


def whole(model: Any) -> Variant:
    undo = whole_graph.apply(model)
    prefill = torch.compile(model.forward, fullgraph=True, dynamic=True)
    # Not dynamic: module floats would become inputs on the CPU, which CUDA graphs refuse.
    decode = torch.compile(model.forward, fullgraph=True, dynamic=False, mode="reduce-overhead")
    return Variant(prefill, decode, True, undo)


VARIANTS = {f.__name__: f for f in (eager, stock, ple, ple_whole, whole)}
CACHE = "cache" if "cache" in inspect.signature(modeling.Qwen4ExpForCausalLM.forward).parameters else "past_key_values"


def milliseconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


class Session:
    """One variant's cache and its calls."""

    def __init__(self, model: Any, variant: Variant):
        self.model, self.variant = model, variant
        self.new_cache()

    def new_cache(self) -> None:
        config = self.model.config
        if self.variant.static:
            self.cache: Any = StaticCache(config=config, max_cache_len=MAX_CACHE_LEN)
            whole_graph.prepare_cache(self.model.model, self.cache, 1)
        else:
            self.cache = DynamicCache(config=config)

    def prefill(self, prompt: Tensor) -> None:
        # A static cache is used again, as a server would: its addresses are those of the recorded CUDA graph.
        if self.variant.static:
            self.cache.reset()
            whole_graph.prepare_cache(self.model.model, self.cache, 1)
        else:
            self.new_cache()
        self.step(self.variant.prefill if prompt.shape[1] > 1 else self.variant.decode, prompt)

    def step(self, call: Callable[..., Any], tokens: Tensor) -> None:
        self.next_tokens = call(tokens, logits_to_keep=1, **{CACHE: self.cache}).logits[:, -1:].argmax(-1)

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.step(self.variant.decode, self.next_tokens)


@torch.no_grad()
def measure(model: Any, name: str, prompts: Sequence[int]) -> list[dict]:
    """One row per prompt length."""
    torch._dynamo.reset()
    variant = VARIANTS[name](model)
    session = Session(model, variant)
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> Tensor:
        return torch.randint(0, 248_000, (1, length), generator=generator).cuda()

    started = time.perf_counter()
    session.prefill(draw(40))
    session.decode(3)
    rows = []
    for length in prompts:
        prompt = draw(length)
        first = milliseconds(partial(session.prefill, prompt))
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        repeats = 1 if variant.slow else 3
        prefill = statistics.median(milliseconds(partial(session.prefill, prompt)) for _ in range(repeats))
        session.decode(WARM_STEPS)
        decode = milliseconds(partial(session.decode, STEPS))
        rows.append(
            {
                "variant": name,
                "prompt": length,
                "first prefill ms": first,
                "prefill ms": prefill,
                "prefill tokens/s": length / prefill * 1e3,
                "decode ms/token": decode / STEPS,
                "decode tokens/s": STEPS / decode * 1e3,
                "peak MiB": (torch.cuda.max_memory_allocated() - before) / 2**20,
            }
        )
        print(rows[-1], flush=True)
    print(f"{name}: {time.perf_counter() - started:.0f} s with compilation", flush=True)
    variant.undo()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("whole_model.json"))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--prompts", type=int, nargs="+", default=list(PROMPTS), help="lengths, at most 8,192")
    arguments = parser.parse_args()
    model = make_model()
    kept = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    again = {(name, length) for name in arguments.variants for length in arguments.prompts}
    rows = [row for row in kept if (row["variant"], row["prompt"]) not in again]
    for name in arguments.variants:
        rows += [{**row, "commit": environment()["commit"]} for row in measure(model, name, arguments.prompts)]
        # After each variant: what was measured is kept when a later one does not finish.
        arguments.out.write_text(
            json.dumps({**environment(), "transformers": transformers.__version__, "rows": rows}, indent=1)
        )
    print(markdown(rows))


if __name__ == "__main__":
    main()
