"""A cache's state for "no tokens yet", made before the first call instead of during it.

transformers initialises a cache layer in its first update, on another path than every later call: tensors made under
Dynamo lose their static address, prompts shorter than a convolution take a branch of their own, and a prefill is
another graph than a chunk. A conv state of zeros, a token context of EOS and a recurrent state of zeros give the same
results by the ordinary path, so a fresh (or reset) cache is filled with them and marked as filled.

The indexer reads rotary positions of every earlier token, and the text model keeps them by concatenation, on a
`StaticCache` too. There they go into a buffer of the cache's length, so that no shape grows from step to step.
"""

from typing import Any

import torch
from torch import Tensor, nn


def _static(tensor: Tensor) -> Tensor:
    # Dynamo cannot trace the mark; a cache filled while tracing works, but its first CUDA-graph replays copy it in.
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor


def position_holder(text_model: Any, cache: Any) -> tuple[Any, str]:
    """The object and attribute on which this transformers keeps the positions: a cache layer, or the cache (5.17)."""
    layer = cache.layers[_first_indexed(text_model)]
    name = "indexer_position_ids"
    return (layer, name) if hasattr(layer, name) else (cache, "position_ids")


def _first_indexed(text_model: Any) -> int:
    return next(i for i, kind in enumerate(text_model.config.layer_types) if kind != "linear_attention")


def static_positions(text_model: Any, cache: Any, batch_size: int) -> Tensor | None:
    """The position buffer `[3, B, max_cache_len]` of a static cache, holding what was kept before; else None."""
    if all(kind == "linear_attention" for kind in text_model.config.layer_types):
        return None
    layer = cache.layers[_first_indexed(text_model)]
    if getattr(layer, "max_cache_len", None) is None:
        return None
    holder, name = position_holder(text_model, cache)
    kept = getattr(holder, name, None)
    if kept is not None and kept.shape[-1] == layer.max_cache_len:
        return kept
    buffer = getattr(layer, "ple_positions", None)
    if buffer is None:
        device = text_model.embed_tokens.weight.device
        buffer = torch.zeros(3, batch_size, layer.max_cache_len, dtype=torch.int64, device=device)
        layer.ple_positions = _static(buffer)
    if kept is not None:
        buffer[..., : kept.shape[-1]] = kept
    setattr(holder, name, buffer)
    return buffer


def _fill_linear(module: Any, ple: Any, layer: Any, batch_size: int, like: Tensor) -> None:
    states = {}
    # In the order of transformers' first call: a layer's `dtype` is that of its first state.
    if ple is not None:
        ids = ple.ple_embedding
        tokens = torch.empty(batch_size, 0, dtype=torch.int64, device=like.device)
        states[2] = (tokens, ids.context_len, ids.eos_token_id)
        states[1] = (like.new_empty(batch_size, ple.conv1d.in_channels, 0), ple.short_conv_state_len, 0)
    states[0] = (like.new_empty(batch_size, module.conv_dim, 0), module.conv_kernel_size, 0)
    for index, (empty, width, value) in states.items():
        if layer.has_previous_state[index]:
            continue
        if not layer.is_conv_states_initialized[index]:
            layer.lazy_initialization(conv_states=empty, state_idx=index, conv_kernel_size=width)
        layer.conv_states[index].fill_(value)
        layer.has_previous_state[index] = True
    if not layer.is_recurrent_states_initialized[0]:
        shape = (batch_size, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        layer.lazy_initialization(recurrent_states=like.new_empty(shape, dtype=torch.float32), state_idx=0)


def _fill_static(module: Any, layer: Any, batch_size: int, like: Tensor) -> None:
    if not layer.is_initialized:
        empty = like.new_empty(batch_size, module.config.num_key_value_heads, 0, module.head_dim)
        layer.lazy_initialization(empty, empty)
    if not layer.is_indexer_initialized:
        layer.lazy_initialization_indexer(like.new_empty(batch_size, 0, module.indexer.index_head_dim))


def prepare_cache(text_model: nn.Module, cache: Any, batch_size: int) -> None:
    """Fills a fresh or reset cache as described above; one with tokens in it stays as it is.

    Left to transformers: layers that record their past for cropping, autocast (which decides the types), tensor
    parallelism (which decides the shapes), and the keys of a dynamic cache (an empty tensor is a graph of its own).
    """
    model: Any = text_model
    like = model.embed_tokens.weight
    if torch.is_autocast_enabled(like.device.type) or getattr(model, "_tp_size", None) not in (None, 1):
        return
    for block, layer in zip(model.layers, cache.layers):
        if block.layer_type == "linear_attention":
            if not layer.record_past:
                local = like.new_empty((), device=block.linear_attn.dt_bias.device)
                _fill_linear(block.linear_attn, block.ple, layer, batch_size, local)
        elif getattr(layer, "max_cache_len", None) is not None:
            local = like.new_empty((), device=block.self_attn.q_norm.weight.device)
            _fill_static(block.self_attn, layer, batch_size, local)
    static_positions(model, cache, batch_size)


def make_keys_contiguous(text_model: Any, cache: Any) -> None:
    """Gives a dynamic cache's keys the strides they have in eager mode.

    Inductor drops the empty tensor that the first keys are appended to, and returns them in the strides of what is
    left: the second decode step, whose keys come from a real concatenation, would be compiled anew.
    """
    for block, layer in zip(text_model.layers, cache.layers):
        if block.layer_type != "linear_attention":
            layer.keys, layer.values = layer.keys.contiguous(), layer.values.contiguous()
            layer.indexer_keys = layer.indexer_keys.contiguous()
