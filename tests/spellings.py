"""The PLE layer's mathematics spelled in other ways, part by part, as published and home-made layers spell it.

Of each part the first spelling is the reference model's. All spellings of a part compute the same, but for those that
`tests/test_spellings.py` says to be another layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.reference.config import Config
from examples.reference.ple import PLE, PLEState
from tests.ple_cases import Case

SPELLINGS: dict[str, dict[str, Callable]] = {}


def spelling(part: str, name: str) -> Callable[[Callable], Callable]:
    def add(function: Callable) -> Callable:
        SPELLINGS.setdefault(part, {})[name] = function
        return function

    return add


# older: the tokens 1, 2, ... `size` steps back; `context` [B, size] is None where there is no cache


def history_of(tokens: Tensor, context: Tensor | None, size: int, eos: int) -> Tensor:
    return F.pad(tokens, (size, 0), value=eos) if context is None else torch.cat([context, tokens], dim=1)


@spelling("older", "slices of a history")
def _(tokens, context, size, eos):
    history = history_of(tokens, context, size, eos)
    return [history[:, size - shift : size - shift + tokens.shape[1]] for shift in range(1, size + 1)]


@spelling("older", "rolls of a history")
def _(tokens, context, size, eos):
    history = history_of(tokens, context, size, eos)
    return [torch.roll(history, shift, 1)[:, size:] for shift in range(1, size + 1)]


@spelling("older", "windows of a history")
def _(tokens, context, size, eos):
    return list(history_of(tokens, context, size, eos).unfold(1, size + 1, 1).unbind(-1))[-2::-1]


@spelling("older", "gather by position")
def _(tokens, context, size, eos):
    history = history_of(tokens, context, size, eos)
    place = torch.arange(tokens.shape[1], device=tokens.device) + size
    return [history.gather(1, (place - shift).expand(tokens.shape)) for shift in range(1, size + 1)]


@spelling("older", "pads, cropped")
def _(tokens, context, size, eos):
    if context is not None:
        return SPELLINGS["older"]["slices of a history"](tokens, context, size, eos)
    return [F.pad(tokens, (shift, 0), value=eos)[:, : tokens.shape[1]] for shift in range(1, size + 1)]


@spelling("older", "rolls under a where")
def _(tokens, context, size, eos):
    if context is not None:
        return SPELLINGS["older"]["rolls of a history"](tokens, context, size, eos)
    place = torch.arange(tokens.shape[1], device=tokens.device)
    return [torch.where(place >= shift, torch.roll(tokens, shift, 1), eos) for shift in range(1, size + 1)]


@spelling("older", "slices written into a filled tensor")
def _(tokens, context, size, eos):
    if context is not None:
        return SPELLINGS["older"]["slices of a history"](tokens, context, size, eos)
    older = []
    for shift in range(1, size + 1):
        filled = torch.full_like(tokens, eos)
        filled[:, shift:] = tokens[:, :-shift]
        older.append(filled)
    return older


# hidden: an EOS hides what is older


@spelling("hidden", "a running or")
def _(tokens, older, eos):
    hidden, windows = torch.zeros_like(tokens, dtype=torch.bool), []
    for token in older:
        hidden = hidden | (token == eos)
        windows.append(torch.where(hidden, eos, token))
    return windows


@spelling("hidden", "masked_fill")
def _(tokens, older, eos):
    hidden, windows = older[0].eq(eos), [older[0]]
    for token in older[1:]:
        hidden = torch.logical_or(hidden, token.eq(eos))
        windows.append(token.masked_fill(hidden, eos))
    return windows


@spelling("hidden", "cumprod of what is kept")
def _(tokens, older, eos):
    stacked = torch.stack(older, -1)
    keep = (stacked != eos).long().cumprod(-1)
    return list((stacked * keep + eos * (1 - keep)).unbind(-1))


@spelling("hidden", "cumsum of EOS")
def _(tokens, older, eos):
    stacked = torch.stack(older, -1)
    return list(torch.where((stacked == eos).cumsum(-1) > 0, eos, stacked).unbind(-1))


@spelling("hidden", "nothing")
def _(tokens, older, eos):
    return older


# hash: what the 2-grams, 3-grams, ... are hashed to


@spelling("hash", "running ^")
def _(tokens, windows, multipliers):
    mixed, orders = tokens * multipliers[0], []
    for shift, token in enumerate(windows, start=1):
        mixed = mixed ^ (token * multipliers[shift])
        orders.append(mixed)
    return orders


@spelling("hash", "bitwise_xor, each order anew")
def _(tokens, windows, multipliers):
    orders = []
    for order in range(2, len(windows) + 2):
        mixed = tokens * multipliers[0]
        for shift in range(1, order):
            mixed = torch.bitwise_xor(mixed, windows[shift - 1] * multipliers[shift])
        orders.append(mixed)
    return orders


@spelling("hash", "products of a stack")
def _(tokens, windows, multipliers):
    products = (torch.stack([tokens, *windows], -1) * multipliers).unbind(-1)
    orders = [products[0] ^ products[1]]
    for product in products[2:]:
        orders.append(orders[-1] ^ product)
    return orders


# rows: hashes to rows of the table; `heads` for each order


@spelling("rows", "% of all heads")
def _(orders, sizes, offsets, heads):
    return torch.stack(orders, -1).repeat_interleave(heads, -1) % sizes + offsets


@spelling("rows", "remainder order by order")
def _(orders, sizes, offsets, heads):
    blocks = []
    for index, mixed in enumerate(orders):
        own = slice(index * heads, (index + 1) * heads)
        blocks.append(torch.remainder(mixed.unsqueeze(-1), sizes[own].view(1, 1, -1)) + offsets[own].view(1, 1, -1))
    return torch.cat(blocks, -1)


@spelling("rows", "% head by head, offsets last")
def _(orders, sizes, offsets, heads):
    return torch.stack([orders[head // heads] % sizes[head] for head in range(len(sizes))], 2) + offsets


@spelling("rows", "% of a grid")
def _(orders, sizes, offsets, heads):
    grid = torch.stack(orders, -1).unsqueeze(-1) % sizes.view(-1, heads)
    return (grid + offsets.view(-1, heads)).flatten(-2)


@spelling("rows", "fmod, brought up")
def _(orders, sizes, offsets, heads):
    rest = torch.fmod(torch.stack(orders, -1).repeat_interleave(heads, -1), sizes)
    return torch.where(rest < 0, rest + sizes, rest) + offsets


@spelling("rows", "floor division")
def _(orders, sizes, offsets, heads):
    mixed = torch.stack(orders, -1).repeat_interleave(heads, -1)
    return mixed - torch.div(mixed, sizes, rounding_mode="floor") * sizes + offsets


@spelling("rows", "C's remainder, made positive")
def _(orders, sizes, offsets, heads):
    return torch.fmod(torch.stack(orders, -1).repeat_interleave(heads, -1), sizes).abs() + offsets


@spelling("rows", "numbers for sizes")
def _(orders, sizes, offsets, heads):
    rest = torch.stack([orders[head // heads] % (1009 + 2 * head) for head in range(len(sizes))], 2)
    return rest % sizes + offsets


# lookup


@spelling("lookup", "embedding")
def _(ids, table):
    return F.embedding(ids, table).flatten(-2)


@spelling("lookup", "embedding of flat ids")
def _(ids, table):
    return F.embedding(ids.flatten(), table).view(*ids.shape[:2], -1)


@spelling("lookup", "index")
def _(ids, table):
    return table[ids].flatten(-2)


@spelling("lookup", "index_select of int32 ids")
def _(ids, table):
    return table.index_select(0, ids.int().flatten()).view(*ids.shape[:2], -1)


# projections: key and value


@spelling("projections", "two")
def _(embeddings, key, value):
    return F.linear(embeddings, key), F.linear(embeddings, value)


@spelling("projections", "two, by @")
def _(embeddings, key, value):
    return embeddings @ key.t(), embeddings @ value.t()


@spelling("projections", "one, split")
def _(embeddings, key, value):
    both = F.linear(embeddings, torch.cat([key, value]))
    return both.split([key.shape[0], value.shape[0]], -1)


@spelling("projections", "one for each stream")
def _(embeddings, key, value):
    streams = key.chunk(key.shape[0] // value.shape[0])
    return torch.cat([F.linear(embeddings, part) for part in streams], -1), F.linear(embeddings, value)


# norm: of groups of `width`


@spelling("norm", "rsqrt of the mean of squares")
def _(x, weight, width, eps):
    groups = wide(x).unflatten(-1, (-1, width))
    scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    return ((groups * scale).flatten(-2) * (1.0 + wide(weight))).to(x.dtype)


@spelling("norm", "F.rms_norm, then 1 + w")
def _(x, weight, width, eps):
    normed = F.rms_norm(wide(x).unflatten(-1, (-1, width)), (width,), None, eps).flatten(-2)
    return (normed * (1 + wide(weight))).to(x.dtype)


@spelling("norm", "division by the root")
def _(x, weight, width, eps):
    groups = wide(x).unflatten(-1, (-1, width))
    normed = groups / torch.sqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1 + wide(weight)).view(-1, width)).flatten(-2).to(x.dtype)


@spelling("norm", "a power of the sum of products")
def _(x, weight, width, eps):
    groups = wide(x).unflatten(-1, (-1, width))
    scale = ((groups * groups).sum(-1, keepdim=True) / width + eps) ** -0.5
    return ((groups * scale).flatten(-2) * (1 + wide(weight))).to(x.dtype)


@spelling("norm", "addcmul of the weight")
def _(x, weight, width, eps):
    groups = wide(x).unflatten(-1, (-1, width))
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    return torch.addcmul(normed, normed, wide(weight)).to(x.dtype)


@spelling("norm", "the weight before the scale")
def _(x, weight, width, eps):
    groups = wide(x).unflatten(-1, (-1, width))
    scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    return (groups * (1 + wide(weight)).view(-1, width) * scale).flatten(-2).to(x.dtype)


@spelling("norm", "a vector norm, squared")
def _(x, weight, width, eps):
    groups = wide(x).unflatten(-1, (-1, width))
    squares = torch.linalg.vector_norm(groups, dim=-1, keepdim=True) ** 2
    return ((groups * torch.rsqrt(squares / width + eps)).flatten(-2) * (1 + wide(weight))).to(x.dtype)


@spelling("norm", "rounded before its weight")
def _(x, weight, width, eps):
    return F.rms_norm(x.unflatten(-1, (-1, width)), (width,), None, eps).flatten(-2) * (1 + weight)


@spelling("norm", "w in the place of 1 + w")
def _(x, weight, width, eps):
    normed = F.rms_norm(x.unflatten(-1, (-1, width)), (width,), None, eps)
    return (wide(normed).flatten(-2) * wide(weight)).to(x.dtype)


@spelling("norm", "one for each stream")
def _(x, weight, width, eps):
    parts = zip(x.split(width, -1), weight.split(width))
    return torch.cat([F.rms_norm(wide(part), (width,), 1 + wide(own), eps).to(x.dtype) for part, own in parts], -1)


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# dot: of key and query [B, S, streams, width], scaled


@spelling("dot", "a sum of products")
def _(key, query):
    return (key * query).sum(-1, keepdim=True) / key.shape[-1] ** 0.5


@spelling("dot", "a sum without the last dim")
def _(key, query):
    return (key * query).sum(-1) / key.shape[-1] ** 0.5


@spelling("dot", "einsum")
def _(key, query):
    return torch.einsum("bshd,bshd->bsh", key, query) / key.shape[-1] ** 0.5


@spelling("dot", "matmul of rows and columns")
def _(key, query):
    return (key.unsqueeze(-2) @ query.unsqueeze(-1)).squeeze(-1) * key.shape[-1] ** -0.5


@spelling("dot", "vecdot of a scaled query")
def _(key, query):
    return torch.linalg.vecdot(key, query * key.shape[-1] ** -0.5)


@spelling("dot", "a mean of products")
def _(key, query):
    return (key * query).mean(-1, keepdim=True) * key.shape[-1] ** 0.5


@spelling("dot", "stream by stream, stacked")
def _(key, query):
    dots = [(key[:, :, stream] * query[:, :, stream]).sum(-1) for stream in range(key.shape[2])]
    return torch.stack(dots, -1) / key.shape[-1] ** 0.5


# root: signed


@spelling("root", "sign times root")
def _(dot):
    return dot.sign() * dot.abs().clamp(min=1e-6).sqrt()


@spelling("root", "a power, maximum")
def _(dot):
    return torch.maximum(dot.abs(), dot.new_full((), 1e-6)) ** 0.5 * torch.sign(dot)


@spelling("root", "where, by cases")
def _(dot):
    root = dot.abs().clamp_min(1e-6).sqrt()
    return torch.where(dot > 0, root, torch.where(dot < 0, -root, torch.zeros_like(root)))


@spelling("root", "copysign")
def _(dot):
    return torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot)


@spelling("root", "another bound")
def _(dot):
    return dot.sign() * dot.abs().clamp(min=1e-5).sqrt()


# product: sigmoid of the scores [B, S, streams] or with a last dim of one, times value [B, S, width]


@spelling("product", "with a last dim of one")
def _(scores, value, streams):
    return (torch.sigmoid(scores.view(*value.shape[:2], streams, 1)) * value.unsqueeze(-2)).flatten(-2)


@spelling("product", "unsqueezed after the sigmoid")
def _(scores, value, streams):
    return (scores.view(*value.shape[:2], streams).sigmoid()[..., None] * value[..., None, :]).flatten(-2)


@spelling("product", "einsum")
def _(scores, value, streams):
    return torch.einsum("bsh,bsd->bshd", torch.sigmoid(scores.view(*value.shape[:2], streams)), value).flatten(-2)


@spelling("product", "lerp from zero")
def _(scores, value, streams):
    opening = torch.sigmoid(scores.view(*value.shape[:2], streams, 1))
    return torch.lerp(torch.zeros_like(value).unsqueeze(-2), value.unsqueeze(-2), opening).flatten(-2)


@spelling("product", "addcmul to zero")
def _(scores, value, streams):
    opening = torch.sigmoid(scores.view(*value.shape[:2], streams, 1))
    return torch.addcmul(value.new_zeros(()), opening, value.unsqueeze(-2)).flatten(-2)


@spelling("product", "repeated values")
def _(scores, value, streams):
    opening = torch.sigmoid(scores.view(*value.shape[:2], streams, 1)).expand(-1, -1, -1, value.shape[-1])
    return opening.flatten(-2) * value.repeat(1, 1, streams)


@spelling("product", "stream by stream, joined")
def _(scores, value, streams):
    by_stream = scores.view(*value.shape[:2], streams, 1).unbind(2)
    return torch.cat([torch.sigmoid(score) * value for score in by_stream], -1)


@spelling("product", "a sigmoid by hand")
def _(scores, value, streams):
    opening = 1 / (1 + torch.exp(-scores.view(*value.shape[:2], streams, 1)))
    return (opening * value.unsqueeze(-2)).flatten(-2)


# masked


@spelling("masked", "a product")
def _(x, mask):
    return x * mask.unsqueeze(-1)


@spelling("masked", "where")
def _(x, mask):
    return torch.where(mask.unsqueeze(-1), x, 0)


# conv: silu of the convolution of x [B, S, C] with weight [C, 1, K], `state` [B, C, (K - 1) * dilation] or None


def joined(x: Tensor, weight: Tensor, state: Tensor | None, dilation: int) -> Tensor:
    reach = (weight.shape[-1] - 1) * dilation
    return F.pad(x.mT, (reach, 0)) if state is None else torch.cat([state, x.mT], -1)


@spelling("conv", "conv1d of a padded sequence")
def _(x, weight, state, dilation):
    convolved = F.conv1d(joined(x, weight, state, dilation), weight, groups=weight.shape[0], dilation=dilation)
    return F.silu(convolved).mT


@spelling("conv", "conv1d with padding=, cropped")
def _(x, weight, state, dilation):
    if state is not None:
        return SPELLINGS["conv"]["conv1d of a padded sequence"](x, weight, state, dilation)
    reach = (weight.shape[-1] - 1) * dilation
    convolved = F.conv1d(x.mT, weight, padding=reach, groups=weight.shape[0], dilation=dilation)[..., : x.shape[1]]
    return (convolved * torch.sigmoid(convolved)).mT


@spelling("conv", "padded before the transpose")
def _(x, weight, state, dilation):
    reach = (weight.shape[-1] - 1) * dilation
    sequence = F.pad(x, (0, 0, reach, 0)) if state is None else torch.cat([state.mT, x], 1)
    return F.silu(F.conv1d(sequence.mT, weight, groups=weight.shape[0], dilation=dilation)).mT


@spelling("conv", "silu after the transpose back")
def _(x, weight, state, dilation):
    zeros = x.new_zeros(x.shape[0], x.shape[2], (weight.shape[-1] - 1) * dilation) if state is None else state
    sequence = torch.cat([zeros, x.mT], -1)
    return F.silu(F.conv1d(sequence, weight, groups=weight.shape[0], dilation=dilation).mT.contiguous())


@spelling("conv", "slices times taps")
def _(x, weight, state, dilation):
    sequence, total = joined(x, weight, state, dilation), 0
    for tap in range(weight.shape[-1]):
        total = total + sequence[..., tap * dilation : tap * dilation + x.shape[1]] * weight[:, :, tap]
    return F.silu(total).mT


@spelling("conv", "shifts times taps")
def _(x, weight, state, dilation):
    if state is not None:
        return SPELLINGS["conv"]["slices times taps"](x, weight, state, dilation)
    total = x * weight[:, 0, -1]
    for tap in range(weight.shape[-1] - 1):
        lag = (weight.shape[-1] - 1 - tap) * dilation
        total = total + F.pad(x, (0, 0, lag, 0))[:, : x.shape[1]] * weight[:, 0, tap]
    return F.silu(total)


@spelling("conv", "unfold")
def _(x, weight, state, dilation):
    windows = joined(x, weight, state, dilation).unfold(-1, (weight.shape[-1] - 1) * dilation + 1, 1)[..., ::dilation]
    return F.silu((windows * weight).sum(-1)).mT


@spelling("conv", "unfold and einsum")
def _(x, weight, state, dilation):
    windows = joined(x, weight, state, dilation).unfold(-1, (weight.shape[-1] - 1) * dilation + 1, 1)[..., ::dilation]
    return F.silu(torch.einsum("bcsk,ck->bsc", windows, weight[:, 0]))


@spelling("conv", "conv2d")
def _(x, weight, state, dilation):
    sequence = joined(x, weight, state, dilation).unsqueeze(2)
    return F.silu(F.conv2d(sequence, weight.unsqueeze(2), groups=weight.shape[0], dilation=(1, dilation)).squeeze(2)).mT


@spelling("conv", "another activation")
def _(x, weight, state, dilation):
    convolved = F.conv1d(joined(x, weight, state, dilation), weight, groups=weight.shape[0], dilation=dilation)
    return F.gelu(convolved).mT


@spelling("conv", "relu of slices times taps")
def _(x, weight, state, dilation):
    sequence, total = joined(x, weight, state, dilation), 0
    for tap in range(weight.shape[-1]):
        total = total + sequence[..., tap * dilation : tap * dilation + x.shape[1]] * weight[:, :, tap]
    return F.relu(total).mT


# sum: of the streams, the gated value and the convolution


@spelling("sum", "the layer's parts first")
def _(streams, gated, convolved):
    return streams + (gated + convolved)


@spelling("sum", "one after the other")
def _(streams, gated, convolved):
    return streams + gated + convolved


@spelling("sum", "the convolution first")
def _(streams, gated, convolved):
    return gated + (convolved + streams)


@spelling("sum", "stream by stream")
def _(streams, gated, convolved):
    split = [x.unflatten(-1, (2, -1)) for x in (streams, gated, convolved)]
    return (split[1] + split[2] + split[0]).flatten(-2)


@spelling("sum", "every pair of tokens")
def _(streams, gated, convolved):
    return (gated[:, :, None] + convolved[:, None]).mean(2) + streams


class SpelledPLE(PLE):
    """A layer in the given spellings; it adds itself to the streams."""

    def __init__(self, config: Config, chosen: dict[str, str]) -> None:
        super().__init__(config, 0)
        self.spell = {part: ways[chosen.get(part, next(iter(ways)))] for part, ways in SPELLINGS.items()}

    def forward(
        self, streams: Tensor, input_ids: Tensor, mask: Tensor | None = None, state: PLEState | None = None
    ) -> Tensor:
        spell, eos, size = self.spell, self.eos, self.ngram_size - 1
        tokens = input_ids.long() if mask is None else torch.where(mask, input_ids.long(), eos)
        context = None if state is None else state.context
        windows = spell["hidden"](tokens, spell["older"](tokens, context, size, eos), eos)
        table = self.ple_embedding
        heads = table.ngram_heads_vocab_sizes.shape[0] // size
        orders = spell["hash"](tokens, windows, table.layer_multipliers)
        ids = spell["rows"](orders, table.ngram_heads_vocab_sizes, table.ngram_heads_offsets, heads)
        embeddings = spell["lookup"](ids, table.ngram_embedding.weight)

        key, value = spell["projections"](embeddings, self.key_proj.weight, self.value_proj.weight)
        split, norm = (self.num_streams, self.hidden_size), spell["norm"]
        key = norm(key, self.norm_key.weight, self.hidden_size, 1e-6).unflatten(-1, split)
        query = norm(streams, self.norm_query.weight, self.hidden_size, 1e-6).unflatten(-1, split)
        gated = spell["product"](spell["root"](spell["dot"](key, query)), value, self.num_streams)
        normed = norm(gated, self.norm_conv.weight, self.hidden_size, 1e-6)
        if mask is not None:
            gated, normed = (spell["masked"](x, mask) for x in (gated, normed))
        past = None if state is None else state.conv
        convolved = spell["conv"](normed, self.conv1d.weight, past, self.ngram_size)
        out = spell["sum"](streams, gated, convolved)
        if state is not None:
            history = torch.cat([state.context, tokens], 1)
            state.context.copy_(history[:, history.shape[1] - size :])
            columns = torch.cat([state.conv, normed.mT], -1)
            state.conv.copy_(columns[..., columns.shape[-1] - self.reach :])
        return out


@dataclass(frozen=True)
class SpelledCase(Case):
    """A reference layer of which some parts are spelled otherwise: pairs of part and spelling."""

    model: str = "reference"
    spelled: tuple[tuple[str, str], ...] = ()

    def layer(self) -> nn.Module:
        layer = SpelledPLE(Config.from_transformers(self.hf_config()), dict(self.spelled))
        layer.load_state_dict(dataclasses.replace(self).reference_layer().state_dict())
        return layer.to(self.storage_dtype).eval()

    def reference_layer(self) -> nn.Module:
        return super().layer()

    def call(self, layer: nn.Module, streams: Tensor, ids: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        return layer(streams, ids, mask, cache)
