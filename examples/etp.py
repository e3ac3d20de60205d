"""Engram tensor parallelism on the reference model: table rows split over TP, or TP x DP, ranks.

    torchrun --nproc-per-node 2 -m examples.etp --tp 2
    torchrun --nproc-per-node 4 -m examples.etp --tp 2                      two data-parallel groups, one table
    torchrun --nproc-per-node 4 -m examples.etp --tp 2 --backend ple --lowering reduce_scatter

The ranks of one tensor-parallel group generate for the same prompt, each group for its own, a step later than the one
before: while one prefills, another decodes, and a group that has nothing to do runs one token of padding, since every
rank takes part in every lookup. The tokens must be those of the model before its table was sharded. Everything but the
table is replicated; sharding the rest is PyTorch's business. Uses the GPUs if every process can have its own.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ple_compile
from examples.reference import ForCausalLM, flash_next, tiny
from ple_compile.sharding.shard import shard_tables
from ple_compile.tables.find import find_tables


class Generation:
    """Greedy tokens for one prompt, one forward pass at a time."""

    def __init__(self, model: ForCausalLM, prompt: list[int], num_tokens: int) -> None:
        self.model, self.num_tokens = model, num_tokens
        self.cache = model.new_cache(1, len(prompt) + num_tokens)
        self.new, self.tokens = prompt, list[int]()

    def step(self) -> None:
        device = self.model.lm_head.weight.device
        if len(self.tokens) == self.num_tokens:
            self.model(torch.zeros(1, 1, dtype=torch.int64, device=device))  # a token of padding, without a cache
            return
        logits = self.model(torch.tensor([self.new], device=device), cache=self.cache, logits_to_keep=1)
        self.new = [int(logits.argmax())]
        self.tokens += self.new


@torch.no_grad()
def main(argv: list[str] | None = None) -> list[int]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=["tiny", "flash_next"], default="tiny")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--longest-prompt", type=int, default=20)
    parser.add_argument("--backend", choices=["eager", "ple"], default="eager")
    parser.add_argument("--lowering", default="auto", help="Config.etp_lowering, with --backend ple")
    parser.add_argument("--host", action="store_true", help="the shards in page-locked host memory")
    args = parser.parse_args(argv)

    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    if world % args.tp:
        raise ValueError(f"--tp {args.tp} does not divide the {world} processes")
    device = "cuda" if torch.cuda.device_count() >= world else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    mesh = init_device_mesh(device, (world // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    group = mesh.get_local_rank("dp")

    torch.manual_seed(0)
    config = tiny() if args.preset == "tiny" else flash_next()
    with torch.device(device):
        model = ForCausalLM(config)
    torch.manual_seed(1 + group)
    length = int(torch.randint(1, args.longest_prompt + 1, ()))
    prompt = torch.randint(0, config.vocab_size, (length,)).tolist()

    alone = Generation(model, prompt, args.tokens)
    for _ in range(args.tokens):
        alone.step()

    before = sum(table.weight.nbytes for table in find_tables(model))
    shard_tables(model, mesh, ("dp", "tp"), host=args.host)
    after = sum(table.weight.nbytes for table in find_tables(model))
    if args.backend == "ple":
        ple_compile.compile(model, etp_lowering=args.lowering, etp_max_tokens=args.longest_prompt, strict=True)
    together, idle = Generation(model, prompt, args.tokens), Generation(model, prompt, 0)
    for step in range(args.tokens + mesh["dp"].size()):
        (together if step >= group else idle).step()
    if together.tokens != alone.tokens:
        raise AssertionError(f"rank {rank}: {together.tokens} with the sharded table, {alone.tokens} before")

    print(
        f"rank {rank} of dp {mesh['dp'].size()} x tp {args.tp}: a prompt of {length} tokens, {args.tokens} generated "
        f"as before; table {before:,} B, {after:,} on this rank",
        flush=True,
    )
    dist.barrier()
    dist.destroy_process_group()
    return together.tokens


if __name__ == "__main__":
    main()
