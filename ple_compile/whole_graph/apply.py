"""Puts the whole-graph form, or the indexer's part of it, on one model: new `forward`s on its own modules, never on a
class or a module namespace.

What stops Dynamo in transformers' class, and what happens to it here:
- `Qwen4ExpTextQSAIndexer.forward`: a loop over queries with `nonzero` -> `indexer`;
- `torch_chunk_gated_delta_rule`: a loop over chunks -> `delta_rule`, unless flash-linear-attention's kernel is used;
- `Qwen4ExpTextModel.forward`: lazy cache states and growing positions -> `cache`; positions of stride 0, which would
  recompile once, are made contiguous; what is known about the mask goes to the indexers;
- `Qwen4ExpTextExperts.forward`: the "eager" implementation loops over the experts -> "grouped_mm"; in float32 and
  fp16 grouped_mm reads counts back to the host under `torch.compile`, so a single token runs "batched_mm" on CUDA;
- `capture_outputs` installs its hooks in the first call that asks for outputs -> installed beforehand.
Left as they are, because Dynamo traces them: `deprecate_kwarg`, `force_accelerate_hooks`, `merge_with_config_defaults`,
mask creation. Not captured: `Qwen4ExpTextModel.reverse_embedding` (`inputs_embeds` without `ple_input_ids`).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ple_compile.whole_graph import sources
from ple_compile.whole_graph.cache import make_keys_contiguous, position_holder, prepare_cache, static_positions
from ple_compile.whole_graph.delta_rule import make_chunk_rule
from ple_compile.whole_graph.indexer import Layout, make_forward

_TEXT, _INDEXER = "Qwen4ExpTextModel", "Qwen4ExpTextQSAIndexer"
_DELTA, _EXPERTS = "Qwen4ExpTextGatedDeltaNet", "Qwen4ExpTextExperts"


class OwnForward(ValueError):
    """A module to be changed has a `forward` of its own already."""


@dataclass
class Undo:
    """Call it to give the model its own methods back; `changes` says what was replaced, for reports."""

    changes: list[str] = field(default_factory=list)
    _steps: list[Callable[[], None]] = field(default_factory=list)

    def __call__(self) -> None:
        while self._steps:
            self._steps.pop()()

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        forward.by_ple_compile = True  # type: ignore[attr-defined]
        module.forward = MethodType(forward, module)
        self._steps.append(lambda: delattr(module, "forward"))


def _rebind(function: Any, names: dict[str, Any]) -> FunctionType:
    """A copy of a (decorated) function whose innermost body sees `names` among its globals."""
    inner = getattr(function, "__wrapped__", None)
    scope, closure = function.__globals__, function.__closure__
    if inner is None:
        scope = {**scope, **names}
        # By this name Dynamo would look the globals up in the module that they were copied from.
        del scope["__name__"]
    else:
        copy = _rebind(inner, names)
        closure = tuple(CellType(copy) if cell.cell_contents is inner else cell for cell in closure)
    rebound = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    rebound.__kwdefaults__ = function.__kwdefaults__
    return rebound


def _named(original: Callable[..., Any], cache_name: str) -> Callable[..., dict[str, Any]]:
    """What turns the text model's arguments into keywords, the cache by the name that `original` has for it."""
    names = list(inspect.signature(original).parameters)[1:]

    def named(*args: Any, **kwargs: Any) -> dict[str, Any]:
        kwargs = {**dict(zip(names, args)), **kwargs}
        # The name that 5.24 deprecates.
        if cache_name not in kwargs and "past_key_values" in kwargs:
            kwargs[cache_name] = kwargs.pop("past_key_values")
        return kwargs

    return named


def _tokens(kwargs: dict[str, Any]) -> Any:
    return kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")


def _makes_a_cache(self: Any, kwargs: dict[str, Any]) -> bool:
    use_cache = kwargs["use_cache"] if kwargs.get("use_cache") is not None else self.config.use_cache
    return bool(use_cache) and not self.training


def _describe(layout: Layout, kwargs: dict[str, Any], cached: bool) -> None:
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict) or (mask is not None and mask.ndim == 4):
        layout.name = "any"
    elif mask is None and not cached and kwargs.get("position_ids") is not None:
        # Positions may restart: transformers then keeps packed sequences apart.
        layout.name = "interval"
    else:
        layout.name = "prefix"
    layout.single_query = _tokens(kwargs).shape[1] == 1


def _make_describing_forward(layout: Layout, original: Callable[..., Any], cache_name: str) -> Callable[..., Any]:
    """`Qwen4ExpTextModel.forward` with its mask described, and nothing else."""
    named = _named(original, cache_name)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = named(*args, **kwargs)
        if _tokens(kwargs) is not None:
            _describe(layout, kwargs, kwargs.get(cache_name) is not None or _makes_a_cache(self, kwargs))
        return original(self, **kwargs)

    return forward


def _make_text_forward(layout: Layout, original: Callable[..., Any], cache_name: str) -> Callable[..., Any]:
    """`Qwen4ExpTextModel.forward` with its cache prepared, its positions contiguous and its mask described."""
    named = _named(original, cache_name)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = named(*args, **kwargs)
        tokens = _tokens(kwargs)
        if tokens is None:
            return original(self, **kwargs)
        batch_size, num_queries = tokens.shape[:2]
        cache = kwargs.get(cache_name)
        if cache is None and _makes_a_cache(self, kwargs):
            cache = kwargs[cache_name] = DynamicCache(config=self.config)
        _describe(layout, kwargs, cache is not None)

        position_ids = kwargs.get("position_ids")
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(num_queries, device=tokens.device) + past
        if position_ids.ndim < 3:
            position_ids = position_ids.expand(4, batch_size, num_queries)
        if cache is None:
            return original(self, **{**kwargs, "position_ids": position_ids})

        prepare_cache(self, cache, batch_size)
        # Kept on the cache: no strides of 0 and no view, or the next call's guards fail. The rows left out tell packed
        # sequences apart, which transformers does without a cache only.
        position_ids = position_ids[-3:].expand(3, -1, -1).clone(memory_format=torch.contiguous_format)
        buffer = static_positions(self, cache, batch_size)
        if buffer is None:
            outputs = original(self, **{**kwargs, "position_ids": position_ids})
            make_keys_contiguous(self, cache)
            return outputs
        # The original appends the new positions to the kept ones. The kept ones being the whole buffer, new ones
        # included, a block start is found at its own index and the queries' at the end, and no shape grows.
        where = torch.arange(num_queries, device=buffer.device) + cache.get_seq_length()
        buffer.index_copy_(2, where, position_ids)
        outputs = original(self, **{**kwargs, "position_ids": position_ids})
        holder, name = position_holder(self, cache)
        setattr(holder, name, buffer)
        return outputs

    from transformers import DynamicCache

    return forward


def _make_experts_forward(layout: Layout, original: Callable[..., Any]) -> Callable[..., Any]:
    from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        name, weight = self.config._experts_implementation, self.down_proj
        reads_back = name in ("eager", "grouped_mm", None) and weight.dtype != torch.bfloat16
        if reads_back and layout.single_query and weight.device.type == "cuda":
            return batched_mm_experts_forward(self, *args, **kwargs)
        if name in ("eager", None):
            return grouped_mm_experts_forward(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return forward


def _install_capture_hooks(text_model: Any, undo: Undo) -> None:
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    before = {module: set(module._forward_hooks) for module in text_model.modules()}
    maybe_install_capturing_hooks(text_model)
    added = [(module, key) for module, keys in before.items() for key in set(module._forward_hooks) - keys]

    def remove() -> None:
        for module, key in added:
            module._forward_hooks.pop(key, None)
        vars(text_model).pop("_output_capturing_hooks_installed", None)

    if added:
        undo._steps.append(remove)


def _uses_torch_rule(modeling: ModuleType) -> bool:
    """Whether the chunk rule is transformers' own loop rather than flash-linear-attention's kernel."""
    rule: Any = modeling.torch_chunk_gated_delta_rule
    return not inspect.getclosurevars(rule).nonlocals.get("is_new_implementation", False)


def text_models(model: nn.Module) -> list[nn.Module]:
    """The transformers Qwen4Exp text models inside `model`."""
    return [
        module
        for module in model.modules()
        if type(module).__name__ == _TEXT and type(module).__module__.startswith("transformers.")
    ]


def has_indexer(texts: list[nn.Module]) -> bool:
    """Whether a layer of these text models selects tokens with a QSA indexer."""
    return any(type(module).__name__ == _INDEXER for text in texts for module in text.modules())


def clean_copy(modules: list[nn.Module]) -> None:
    """Take away the forwards that copies of changed modules have of them; unpickled ones are the class's own."""
    for module in modules:
        own = vars(module).get("forward")
        if getattr(own, "by_ple_compile", False) or own == MethodType(type(module).forward, module):
            del module.forward


def apply(model: nn.Module) -> Undo:
    """Replaces, on the modules of `model`, what keeps transformers' Qwen4Exp from being captured as one graph.

    Raises a ValueError when there is no such text model in it, when transformers' source is not a known one, or when
    a module to be changed already has a `forward` of its own (accelerate's hooks, an earlier `apply`).
    """
    from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

    def replacements(layout: Layout, additive: bool, cache_name: str) -> dict[str, Callable[..., Any]]:
        changed = {
            _TEXT: _make_text_forward(layout, modeling.Qwen4ExpTextModel.forward, cache_name),
            _INDEXER: make_forward(layout, additive),
            _EXPERTS: _make_experts_forward(layout, modeling.Qwen4ExpTextExperts.forward),
        }
        if _uses_torch_rule(modeling):
            rule = make_chunk_rule(modeling.torch_chunk_gated_delta_rule)
            changed[_DELTA] = _rebind(
                modeling.Qwen4ExpTextGatedDeltaNet.forward, {"torch_chunk_gated_delta_rule": rule}
            )
        return changed

    undo = _replace_forwards(model, replacements)
    try:
        for text_model in text_models(model):
            _install_capture_hooks(text_model, undo)
    except BaseException:
        undo()
        raise
    return undo


def apply_indexer(model: nn.Module) -> Undo:
    """Replaces the indexers' loop alone: the same tokens are selected, and everything else computes as it did.

    Raises as `apply` does.
    """
    from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

    def replacements(layout: Layout, additive: bool, cache_name: str) -> dict[str, Callable[..., Any]]:
        text = _make_describing_forward(layout, modeling.Qwen4ExpTextModel.forward, cache_name)
        return {_TEXT: text, _INDEXER: make_forward(layout, additive)}

    return _replace_forwards(model, replacements)


def _replace_forwards(
    model: nn.Module, replacements: Callable[[Layout, bool, str], dict[str, Callable[..., Any]]]
) -> Undo:
    found = text_models(model)
    if not found:
        raise ValueError(f"{type(model).__name__} holds no transformers Qwen4ExpTextModel; nothing to apply to")
    import transformers
    from transformers import cache_utils
    from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

    release = sources.check(modeling, cache_utils, transformers.__version__)
    parameters = inspect.signature(modeling.Qwen4ExpTextModel.forward).parameters
    undo = Undo()
    for text_model in found:
        changed = replacements(Layout(), release == "5.17.0", "cache" if "cache" in parameters else "past_key_values")
        for name, module in text_model.named_modules():
            if type(module).__name__ in changed and "forward" in vars(module):
                undo()
                raise OwnForward(f"{name or 'the text model'} already has a forward of its own; undo that first")
        for module in text_model.modules():
            if (forward := changed.get(type(module).__name__)) is not None:
                undo._replace(module, forward)
        undo.changes += sorted(changed)
    return undo
