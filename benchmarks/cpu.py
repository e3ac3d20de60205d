"""A PLE layer and a small model on a CPU with one thread: eager, stock Inductor, ours.

    python benchmarks/cpu.py layers --out cpu.json    # PLE layers alone: the reference's, transformers' with a cache
    python benchmarks/cpu.py model --out cpu.json     # the quickstart's model, all of it

Median microseconds of a call; the ways take turns, a few calls each, so that whatever else the machine does meets all
of them. What was measured before stays in the JSON.
"""

import argparse
import copy
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.quickstart import TINY, build_model
from examples.reference.config import Config
from examples.reference.ple import PLE
from ple_compile.measuring.timing import environment, markdown

BLOCK, SECONDS = 5, 1.0  # calls in a row; for each way
STOCK_LIMIT = 64  # graphs of one function: the ways differ in time, not in how much is compiled
ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}


def interleaved(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median microseconds of each way's calls."""
    for way in ways.values():
        for _ in range(3):
            way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + SECONDS * len(ways)
    while time.perf_counter() < end:
        for name, way in ways.items():
            for _ in range(BLOCK):
                start = time.perf_counter()
                way()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) * 1e6 for name, found in times.items()}


def row(described: dict[str, Any], ways: dict[str, Callable[[], Tensor]]) -> dict[str, Any]:
    """What is measured of one shape, after a look at the results: stock's may be wrong in 16-bit types."""
    expected, actual = (ways[name]().double() for name in ("eager", "ours"))
    distance = torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected)
    assert distance < 2e-2, distance
    found = interleaved(ways)
    result = {**described, **found, "ours / stock": round(found["ours"] / found["stock"], 3)}
    print(result, flush=True)
    return result


def ple_layer(kind: str, hidden: int, dtype: torch.dtype) -> tuple[nn.Module, Qwen4ExpTextConfig]:
    torch.manual_seed(0)
    fixed = dict(num_hidden_layers=2, ple_layer_ids=[2], hc_count=4, indexer_kv_heads=1, eos_token_id=3, pad_token_id=0)
    widths = dict(hidden_size=hidden, ple_embed_dim=hidden)
    config = Qwen4ExpTextConfig(**{**TINY, **fixed, **widths}, rope_parameters=ROPE)
    made = PLE(Config.from_transformers(config), 0) if kind == "reference" else Qwen4ExpTextPLELayer(config, 1, 0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made.to(dtype).eval(), config


class LayerWays:
    """One PLE layer: what the decoder layer does with it, in each way and with a cache of its own for each."""

    def __init__(self, kind: str, cached: bool, hidden: int, dtype: torch.dtype):
        torch._dynamo.reset()
        self.described = {"layer": kind, "cache": cached, "dtype": str(dtype)[6:], "hidden": hidden}
        self.kind, self.cached, self.channels, self.dtype = kind, cached, 4 * hidden, dtype
        self.layer, self.config = ple_layer(kind, hidden, dtype)
        self.calls = {
            "eager": self.forward,
            "stock": torch.compile(self.stock, dynamic=True),
            "ours": torch.compile(self.ours, dynamic=True, backend="ple", options={"strict": True}),
        }

    def forward(self, streams: Tensor, ids: Tensor, cache: Any) -> Tensor:
        arguments = (streams, ids, None, cache) if self.kind == "reference" else (streams, ids, cache)
        return streams + self.layer(*arguments)

    # Two functions, so that each way has a cache of compiled code to itself.
    def stock(self, streams: Tensor, ids: Tensor, cache: Any) -> Tensor:
        return self.forward(streams, ids, cache)

    def ours(self, streams: Tensor, ids: Tensor, cache: Any) -> Tensor:
        return self.forward(streams, ids, cache)

    def new_cache(self) -> Any:
        if not self.cached:
            return None
        layer: Any = self.layer
        return layer.initial_state(1) if self.kind == "reference" else DynamicCache(config=self.config)

    def measured(self, tokens: int) -> dict[str, Any]:
        streams, ids = torch.randn(1, tokens, self.channels).to(self.dtype), torch.randint(0, 200, (1, tokens))
        ways = {name: partial(call, streams, ids, self.new_cache()) for name, call in self.calls.items()}
        if self.cached:
            for fill in ways.values():
                fill()
        return row({**self.described, "tokens": tokens}, ways)


def layers(dtypes: list[str], hiddens: list[int], tokens: list[int]) -> list[dict]:
    kinds = (("reference", False), ("transformers", True))
    shapes = itertools.product(dtypes, kinds, hiddens)
    made = (LayerWays(kind, cached, hidden, getattr(torch, dtype)) for dtype, (kind, cached), hidden in shapes)
    return [ways.measured(count) for ways in made for count in tokens]


def model(dtypes: list[str], tokens: list[int]) -> list[dict]:
    rows = []
    for dtype in dtypes:
        torch._dynamo.reset()
        eager = build_model("cpu").to(getattr(torch, dtype))
        made = {"eager": eager, "stock": copy.deepcopy(eager), "ours": copy.deepcopy(eager)}
        made["stock"].compile()
        made["ours"].compile(backend="ple")
        for count in tokens:
            ids = torch.randint(4, 200, (1, count))
            ways = {name: partial(logits, each, ids) for name, each in made.items()}
            rows.append(row({"model": "quickstart", "dtype": dtype, "tokens": count}, ways))
    return rows


def logits(causal: nn.Module, ids: Tensor) -> Tensor:
    return causal(ids, use_cache=False).logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("layers", "model"))
    parser.add_argument("--out", type=Path, default=Path("cpu.json"))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--hidden", nargs="+", type=int, default=[64])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 64, 512])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = STOCK_LIMIT
    with torch.no_grad():
        rows = {
            "layers": lambda: layers(options.dtypes, options.hidden, options.tokens),
            "model": lambda: model(options.dtypes, options.tokens),
        }[options.what]()
    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    kept |= {
        options.what: {"environment": {**environment("cpu"), "transformers": transformers.__version__}, "rows": rows}
    }
    options.out.write_text(json.dumps(kept, indent=1) + "\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
