"""`torch_chunk_gated_delta_rule` without its loop over chunks, which Dynamo unrolls and specialises on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ple_compile.ops.chunk_gated_delta_rule import chunk_gated_delta_rule


def make_chunk_rule(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same call as `original`; with gradients, or packed lengths, it is `original`: the op has no backward."""

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        tensors = (query, key, value, g, beta, initial_state)
        needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        if needs_grad or kwargs.get("cu_seqlens") is not None:
            return original(
                query,
                key,
                value,
                g=g,
                beta=beta,
                chunk_size=chunk_size,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **kwargs,
            )
        out, state = chunk_gated_delta_rule(*tensors, chunk_size, use_qk_l2norm_in_kernel)
        return out, state if output_final_state else None

    return rule
