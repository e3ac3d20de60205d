"""Continuous batching on the reference model: requests come, prefill in chunks, decode, finish, and free their slot.

    python -m examples.continuous_batching
    python -m examples.continuous_batching --preset flash_next --device cuda --backend ple

Every generated token is compared with what the padded model generates for that request alone, eagerly. On CUDA a step
in which every request decodes is a CUDA graph. `--backend` compiles the PLE layers.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from examples.reference import Config, ForCausalLM, flash_next, tiny
from examples.reference.packed import PackedBatch, PackedPLE
from examples.reference.packed_model import Group, PackedForCausalLM, equal_length_groups


@dataclass
class Request:
    prompt: list[int]
    max_new_tokens: int
    generated: list[int] = field(default_factory=list)
    computed: int = 0  # tokens that the model has seen
    slot: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated


@dataclass
class Piece:
    """A request's tokens in one step."""

    request: Request
    end: int

    def context(self, config: Config) -> list[int]:
        """The tokens before the piece. They are hashed whatever they are, so a placeholder must not get here."""
        size = config.ngram_size - 1
        tokens = ([config.eos_token_id] * size + self.request.tokens[: self.request.computed])[-size:]
        if not all(0 <= token < config.vocab_size for token in tokens):
            raise ValueError(
                f"ngram_context must hold tokens of the vocabulary only, got {tokens}: pass accepted tokens"
            )
        return tokens


class DecodeStep:
    """One token for each of `width` requests, in tensors that stay where they are; slot 0 fills empty places."""

    def __init__(self, model: PackedForCausalLM, cache, width: int) -> None:
        device, config = model.lm_head.weight.device, model.config
        self.eos, self.width = config.eos_token_id, width
        self.input_ids = torch.full((width,), self.eos, device=device)
        slots = torch.zeros(width, dtype=torch.int64, device=device)
        self.batch = PackedBatch(
            query_start_loc=torch.arange(width + 1, device=device),
            ngram_context=torch.full((width, config.ngram_size - 1), self.eos, device=device),
            state_indices=slots,
            has_initial_state=torch.ones(width, dtype=torch.bool, device=device),
        )
        groups = [Group(slots, torch.arange(width, device=device).unsqueeze(-1))]
        self.run = lambda: model(self.input_ids, self.batch, groups, cache)
        self.graph = self.capture() if device.type == "cuda" else None

    def capture(self) -> torch.cuda.CUDAGraph:
        """All slots are 0 here, so that warming up changes no request's state."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self.run()
        return graph

    def __call__(self, pieces: list[Piece], config: Config) -> Tensor:
        fill = self.width - len(pieces)
        self.input_ids.copy_(torch.tensor([p.request.tokens[p.end - 1] for p in pieces] + [self.eos] * fill))
        self.batch.state_indices.copy_(torch.tensor([p.request.slot for p in pieces] + [0] * fill))
        no_context = [self.eos] * (config.ngram_size - 1)
        self.batch.ngram_context.copy_(torch.tensor([p.context(config) for p in pieces] + [no_context] * fill))
        if self.graph is None:
            self.logits = self.run()
        else:
            self.graph.replay()
        return self.logits[: len(pieces)]


class Server:
    def __init__(self, model: PackedForCausalLM, num_slots: int, max_length: int, chunk_size: int) -> None:
        self.model, self.chunk_size = model, chunk_size
        self.cache = model.new_cache(num_slots + 1, max_length)
        self.free = list(range(num_slots, 0, -1))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.decode = DecodeStep(model, self.cache, num_slots)
        self.num_steps = {"mixed": 0, "decode": 0}

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def step(self) -> None:
        while self.waiting and self.free:
            request = self.waiting.popleft()
            request.slot = self.free.pop()
            self.cache.clear(torch.tensor([request.slot], device=self.cache.lengths.device))
            self.running.append(request)
        if not self.running:
            return

        pieces = [Piece(r, min(len(r.tokens), r.computed + self.chunk_size)) for r in self.running]
        # The decode step takes every request for one with earlier state.
        decoding = all(p.end - p.request.computed == 1 and p.request.computed > 0 for p in pieces)
        self.num_steps["decode" if decoding else "mixed"] += 1
        logits = self.decode(pieces, self.model.config) if decoding else self.mixed(pieces)

        for piece, token in zip(pieces, logits.argmax(-1).tolist()):
            request = piece.request
            request.computed = piece.end
            if piece.end == len(request.tokens):
                request.generated.append(token)
                if token == self.model.config.eos_token_id or len(request.generated) == request.max_new_tokens:
                    self.running.remove(request)
                    self.free.append(request.slot)

    def mixed(self, pieces: list[Piece]) -> Tensor:
        """Prefill chunks and decode tokens together; logits of each request's last token."""
        device = self.cache.lengths.device
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + piece.end - piece.request.computed)
        slots = [piece.request.slot for piece in pieces]
        tokens = [token for p in pieces for token in p.request.tokens[p.request.computed : p.end]]
        batch = PackedBatch(
            query_start_loc=torch.tensor(starts, device=device),
            ngram_context=torch.tensor([piece.context(self.model.config) for piece in pieces], device=device),
            state_indices=torch.tensor(slots, device=device),
            has_initial_state=torch.tensor([piece.request.computed > 0 for piece in pieces], device=device),
        )
        groups = equal_length_groups(starts, slots, device)
        last = torch.tensor(starts[1:], device=device) - 1
        return self.model(torch.tensor(tokens, device=device), batch, groups, self.cache, last)


def generate_alone(model: ForCausalLM, request: Request) -> list[int]:
    """Greedy tokens of one request in the padded model, its prompt in one piece."""
    device, tokens = model.lm_head.weight.device, list(request.prompt)
    cache, new = model.new_cache(1, len(tokens) + request.max_new_tokens), tokens
    while True:
        logits = model(torch.tensor([new], device=device), cache=cache, logits_to_keep=1)
        new = [int(logits.argmax())]
        tokens += new
        if new[0] == model.config.eos_token_id or len(tokens) == len(request.prompt) + request.max_new_tokens:
            return tokens[len(request.prompt) :]


def at_least_one(text: str) -> int:
    """For argparse: a whole number from 1 on."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return number


def available_device(text: str) -> torch.device:
    """For argparse: a device that tensors can be made on."""
    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {str(error).splitlines()[0]}") from None


def known_backend(text: str) -> str:
    """For argparse: a name that torch.compile knows."""
    names = sorted(torch.compiler.list_backends(exclude_tags=()))
    if text not in names:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
    return text


def random_requests(config: Config, count: int, longest_prompt: int, longest_answer: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        prompt = [rng.randrange(config.vocab_size) for _ in range(rng.randint(1, longest_prompt))]
        prompt = [config.eos_token_id if rng.random() < 0.1 else token for token in prompt]
        requests.append(Request(prompt, rng.randint(1, longest_answer)))
    return requests


@torch.no_grad()  # not inference_mode: two weights that were made in it cannot be merged into one
def main(argv: list[str] | None = None) -> dict[str, int]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=["tiny", "flash_next"], default="tiny")
    parser.add_argument("--device", type=available_device, default="cpu")
    parser.add_argument("--backend", type=known_backend, help="torch.compile backend for the PLE layers")
    parser.add_argument("--strict", action="store_true", help="with --backend ple: fail where a pass declines")
    parser.add_argument("--requests", type=at_least_one, default=12)
    parser.add_argument("--slots", type=at_least_one, default=4, help="requests that run at the same time")
    parser.add_argument("--chunk-size", type=at_least_one, default=8, help="tokens of a request in one step")
    parser.add_argument("--longest-prompt", type=at_least_one, default=40)
    parser.add_argument("--longest-answer", type=at_least_one, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.strict and args.backend != "ple":
        parser.error("--strict is an option of --backend ple")

    torch.manual_seed(args.seed)
    config = tiny() if args.preset == "tiny" else flash_next()
    with torch.device(args.device):
        model = PackedForCausalLM(config)
        with torch.device("meta"):
            alone = ForCausalLM(config)
    alone.load_state_dict(model.state_dict(), assign=True)  # the same storage
    if args.backend is not None:
        options = {"strict": True} if args.strict else None
        for module in model.modules():
            if isinstance(module, PackedPLE):
                module.compile(backend=args.backend, dynamic=True, fullgraph=True, options=options)

    server = Server(model, args.slots, args.longest_prompt + args.longest_answer, args.chunk_size)
    requests = random_requests(config, args.requests, args.longest_prompt, args.longest_answer, args.seed)
    arriving = deque(requests)
    while arriving or server.waiting or server.running:
        for _ in range(min(2, len(arriving))):
            server.submit(arriving.popleft())
        server.step()

    for i, request in enumerate(requests):
        expected = generate_alone(alone, request)
        if request.generated != expected:
            raise AssertionError(f"request {i}: batched {request.generated}, alone {expected}")
    num_tokens = sum(len(request.generated) for request in requests)
    print(
        f"{len(requests)} requests over {args.slots} slots: {num_tokens} tokens in {server.num_steps['mixed']} mixed "
        f"and {server.num_steps['decode']} decode steps, all equal to one request at a time"
    )
    return {"requests": len(requests), "tokens": num_tokens, **server.num_steps}


if __name__ == "__main__":
    main()
