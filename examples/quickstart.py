"""Compile a Qwen4Exp model with one line, see what was fused, and check it against eager.

    python examples/quickstart.py

On a CPU: a tiny transformers model. On a GPU: the released widths (hidden 2560, 4 streams, table rows of 160) with a
few layers, few experts and a smaller table. Weights are random; tokens and timings are real.
"""

import argparse
import time
from collections.abc import Callable

import torch
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

import ple_compile

TINY = dict(
    vocab_size=256,
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    num_experts=4,
    num_experts_per_tok=2,
    hc_lowrank=16,
    ngram_vocab_size_base=2_000,
    indexer_n_heads=2,
    indexer_head_dim=16,
    indexer_budget=64,
    indexer_compress_ratio=4,
)
RELEASED_WIDTHS = dict(
    vocab_size=32_000,
    hidden_size=2560,
    num_experts=8,
    num_experts_per_tok=2,
    ngram_vocab_size_base=200_000,
    indexer_n_heads=4,
    indexer_head_dim=128,
    indexer_budget=2048,
    indexer_compress_ratio=16,
)


def build_model(device: str) -> Qwen4ExpForCausalLM:
    """A four-layer model with PLE in its second layer and random weights."""
    config = Qwen4ExpTextConfig(
        **(RELEASED_WIDTHS if device == "cuda" else TINY),
        num_hidden_layers=4,
        ple_layer_ids=[2],
        indexer_kv_heads=1,
        hc_count=4,
        eos_token_id=3,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
        },
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen4ExpForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32)


def model() -> Qwen4ExpForCausalLM:
    """What `python -m ple_compile explain examples/quickstart.py` looks at."""
    return build_model("cuda" if torch.cuda.is_available() else "cpu")


def seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Median wall time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-length", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=8)
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    model = build_model(device)
    ids = torch.randint(4, model.config.vocab_size, (1, options.prompt_length), device=device)
    layer = model.model.layers[1].ple
    streams = torch.randn(1, options.prompt_length, 4 * model.config.hidden_size, device=device, dtype=model.dtype)

    def generate() -> torch.Tensor:
        return model.generate(ids, max_new_tokens=options.new_tokens, do_sample=False)

    def ple_layer() -> torch.Tensor:
        return layer(streams, ids, None)

    eager_tokens = generate()
    eager_time = seconds(ple_layer)

    ple_compile.compile(model)
    tokens = generate()
    ple_layer()
    compiled_time = seconds(ple_layer)

    print(ple_compile.explain(model, ids))
    print(f"\nPLE layers run fused: {ple_compile.stats()['ple_executions']}")
    print(f"tokens equal to eager: {torch.equal(tokens, eager_tokens)}")
    print(f"one PLE layer, {options.prompt_length} tokens, {device}: eager {eager_time * 1e3:.2f} ms, ", end="")
    print(f"compiled {compiled_time * 1e3:.2f} ms")
    if not torch.equal(tokens, eager_tokens):
        raise SystemExit("the compiled model gave other tokens")


if __name__ == "__main__":
    main()
