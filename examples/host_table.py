"""A table that does not fit on the GPU: it stays in host memory, and its lookups start one layer ahead.

    python -m examples.host_table

On a GPU: the reference model at released widths with four layers and few experts, its n-gram table page-locked on the
host. On a CPU: what is left of that, a tiny model in eager PyTorch. Weights are random; logits and timings are real.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import ple_compile
from examples.reference.config import flash_next, tiny
from examples.reference.model import ForCausalLM


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Median wall time of a call."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def run_eagerly_on_cpu(num_tokens: int) -> None:
    print("No GPU: page-locked tables and prefetch need one. Eager PyTorch, at a tiny size:")
    torch.manual_seed(0)
    model = ForCausalLM(tiny()).eval()
    tokens = torch.randint(4, model.config.vocab_size, (1, num_tokens))
    print(f"logits of {num_tokens} tokens: {tuple(model(tokens).shape)}")


def run_on_gpu(num_tokens: int, rows_per_head: int) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = ForCausalLM(flash_next(ngram_vocab_size_base=rows_per_head, vocab_size=32_000, num_experts=16)).eval()
    model.requires_grad_(False)

    # Before the model moves: what is offloaded stays on the host from here on.
    (name,) = ple_compile.offload_tables(model)
    model.to("cuda")
    table = model.get_parameter(name)
    print(f"table: {table.nbytes / 2**30:.1f} GiB on {table.device}, page-locked: {table.is_pinned()}")
    print(f"GPU memory in use: {torch.cuda.memory_allocated() / 2**30:.1f} GiB")

    tokens = torch.randint(4, model.config.vocab_size, (1, num_tokens), device="cuda")
    expected = model(tokens)
    eager_ms = milliseconds(lambda: model(tokens))

    model.compile(backend="ple", fullgraph=True)
    actual = model(tokens)
    print(f"eager {eager_ms:.2f} ms, compiled {milliseconds(lambda: model(tokens)):.2f} ms for {num_tokens} tokens\n")
    print(ple_compile.explain(model, tokens))
    agreement = (actual.argmax(-1) == expected.argmax(-1)).float().mean().item()
    print(f"\nnext tokens equal to eager's: {100 * agreement:.1f} %")
    if agreement < 0.95:
        raise SystemExit("the compiled model gave other tokens")


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows-per-head", type=int, default=400_000, help="the release has 20,000,000 (95 GiB)")
    options = parser.parse_args(argv)
    if torch.cuda.is_available():
        run_on_gpu(options.tokens, options.rows_per_head)
    else:
        run_eagerly_on_cpu(options.tokens)


if __name__ == "__main__":
    main()
