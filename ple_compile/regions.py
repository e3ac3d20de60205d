"""`ple_compile.compile(model)`: compile in place, so that every execution of a PLE layer is a compiled one."""

import copy
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ple_compile import accelerate_hooks, records, upstream, whole_graph
from ple_compile.config import Config, make_config
from ple_compile.layers import find_ple_layers
from ple_compile.tables.find import check_is_module
from ple_compile.tables.scales import check_scales

log = logging.getLogger("ple_compile")

# One PLE layer alone has a graph for each of: cache or none, earlier state or none, one token, a prompt shorter than
# the conv window, a longer one. PyTorch's limit of 8 per function, shared by all layers, is reached by two layers.
RECOMPILE_LIMIT = 64

_compiled_models: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_PLACE = "_ple_compile"  # A model's attribute: what holds its modules must not outlive it.


@dataclasses.dataclass
class _Undo:
    """What was done to a model. Copies and pickles of the model have None in its place."""

    config: Config
    attributes: list[tuple[nn.Module, str, Any, Any]]  # module, name, our value, the instance's own value before
    replaced: whole_graph.Undo | None  # forwards of transformers' classes

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        self.attributes.append((module, name, value, vars(module).get(name)))
        setattr(module, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple:
        return type(None), ()

    def forget(self, module: nn.Module, name: str, theirs: Any, before: Any) -> None:
        """Put `before` back at the end where `theirs` was found at the start."""
        for index, (ours_on, ours_named, ours, found) in enumerate(self.attributes):
            if ours_on is module and ours_named == name and found is theirs:
                self.attributes[index] = (ours_on, ours_named, ours, before)


def compile(model: nn.Module, **config: Any) -> nn.Module:
    """Compile `model` in place with `backend="ple"`, and return it.

    The compiled regions are the PLE layers themselves, with dynamic shapes: their graphs do not depend on what else
    breaks a graph. With `whole_graph=True` transformers' Qwen4Exp is compiled as one graph for prefill, one for decode
    and one for a chunk on a filled cache: what keeps its class from being captured is replaced on this model's modules
    (see `ple_compile.whole_graph`), unless its source is not a known one, which is logged. Without it the loop over
    queries in that class's QSA indexer is replaced alone (`Config.indexer`): the same tokens are selected, and all else
    computes as before. Either way each execution of a PLE layer is a compiled one whatever prompt lengths arrive.
    `generate()` of transformers runs through the regions; where it compiles its decode step by itself (static cache on
    CUDA), that compilation uses this backend too. While gradients are recorded for a region's parameters or inputs it
    runs as plain PyTorch, with one warning. `state_dict` and `save_pretrained` work as before. A deep copy or a pickle
    of the model computes the same and is not compiled; with `whole_graph=True`, `restore` it before it is pickled.

    Keyword arguments are the fields of `ple_compile.Config`. Calling it again replaces the earlier configuration.
    While a model is compiled, Dynamo's `recompile_limit` is at least 64 for each model compiled so far, and Dynamo
    guards modules' hooks, which it does not by itself. A layer whose weights accelerate moves in every forward
    (`device_map` with the CPU or disk) is left alone, with a warning or, with `strict=True`, an error.
    Raises ValueError for what is no module, for an unknown option, for hash buffers that do not fit together, for a
    quantised table whose scale is missing, zero or NaN, and, with `strict=True`, for a model without a PLE layer, which
    is otherwise returned as it is, with a warning. A model for which it raises is not compiled in part.
    """
    settings, layers = make_config(config), find_ple_layers(model)
    message = f"{type(model).__name__} has no PLE layer (no module that owns an n-gram table and its hash buffers)"
    if settings.strict and not layers:
        raise ValueError(f"ple_compile.compile(strict=True): {message}; pass the model that holds it")
    check_scales(model)
    restore(model)
    if not layers:
        log.warning("ple_compile.compile: %s; nothing was compiled", message)
        return model
    if not _compiled_models:  # those that were compiled have died
        upstream.reset_dynamo()
    undo = vars(model)[_PLACE] = _Undo(settings, [], None)
    _compiled_models.add(model)
    upstream.set_dynamo(RECOMPILE_LIMIT)
    try:
        undo.replaced, whole = _replace_forwards(model, settings)
        for name, region in _regions(model, layers, whole).items():
            _compile_region(name, region, undo)
        if hasattr(model, "get_compiled_call"):
            undo.set(model, "get_compiled_call", _CompiledCallHook(model))
    except BaseException:
        restore(model)
        raise
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `compile(model)`; a model that is not compiled is left as it is. Returns the model.

    A copy of a compiled model, which is not compiled, is made free of what was copied along. Raises ValueError for what
    is no module.
    """
    check_is_module(model)
    undo = _undo_of(model)
    vars(model).pop(_PLACE, None)
    _compiled_models.discard(model)
    if undo is None:
        _clean_copy(model)
        return model
    for module, name, ours, before in undo.attributes:
        if vars(module).get(name) is ours:
            delattr(module, name)
            if before is not None:
                setattr(module, name, before)
        else:  # somebody has put another one in its place since: what they put back must not be ours
            for later in filter(None, map(_undo_of, _compiled_models)):
                later.forget(module, name, ours, before)
    if undo.replaced is not None:
        undo.replaced()
    for attribute in ("_compiled_call", "_last_compile_config"):  # what transformers compiled for us
        vars(model).pop(attribute, None)
    if not _compiled_models:
        upstream.reset_dynamo()
    return model


def _undo_of(model: nn.Module) -> _Undo | None:
    return vars(model).get(_PLACE)


def _clean_copy(model: nn.Module) -> None:
    """Take away what a copy of a compiled model, or a pickle, has of ours; not what a compiled model around it has."""
    compiled = {id(module) for other in _compiled_models for module in other.modules()}
    copied = [module for module in model.modules() if id(module) not in compiled]
    whole_graph.clean_copy(copied)
    for module in copied:
        if isinstance(vars(module).get("get_compiled_call"), _CompiledCallHook):
            del module.get_compiled_call


def _compile_region(name: str, region: nn.Module, undo: _Undo) -> None:
    """Compile a region, past accelerate's hooks inside it; where these have work to do, warn or raise."""
    idle = accelerate_hooks.idle_inside(region)
    if idle is None:
        if undo.config.strict:
            raise ValueError(_at_work(name))
        log.warning(_at_work(name))
        return
    for module in idle:
        undo.set(module, "forward", module._old_forward)
    undo.set(region, "_compiled_call_impl", _compiled_call(region, name, undo.config))


def _at_work(name: str) -> str:
    return (
        f"ple_compile.compile: accelerate's hooks move weights or inputs inside {name or 'the model'} in every forward "
        "(device_map), so it is not compiled; load the model without offloading this layer, and use "
        "ple_compile.offload_tables"
    )


def _replace_forwards(model: nn.Module, config: Config) -> tuple[whole_graph.Undo | None, bool]:
    """What was replaced on transformers' classes, and whether the text models are now capturable as one graph."""
    texts = whole_graph.text_models(model)
    if texts and config.whole_graph:
        try:
            return whole_graph.apply(model), True
        except ValueError as reason:
            if config.strict:
                raise
            log.warning("ple_compile.compile: each PLE layer is compiled by itself, not the whole model: %s", reason)
    elif config.indexer and whole_graph.has_indexer(texts):
        try:
            return whole_graph.apply_indexer(model), False
        except ValueError as reason:
            # A model that accelerate has dispatched is as its user wants it; an unknown source is news.
            level = logging.INFO if isinstance(reason, whole_graph.OwnForward) else logging.WARNING
            log.log(level, "ple_compile.compile: the QSA indexer keeps its loop over queries: %s", reason)
    return None, False


def _regions(model: nn.Module, layers: dict[str, nn.Module], whole: bool) -> dict[str, nn.Module]:
    """What to compile, by name: the text models where they can be captured, and PLE layers outside of them."""
    texts = {id(module) for module in whole_graph.text_models(model)} if whole else set()
    found = {name: module for name, module in model.named_modules() if id(module) in texts}
    for name, layer in layers.items():
        if not any(name.startswith(f"{text}.") or text == "" for text in found):
            found[name] = layer
    return found


def changes_of(model: nn.Module) -> list[str]:
    """The classes whose forward was replaced."""
    undo = _undo_of(model)
    return list(undo.replaced.changes) if undo is not None and undo.replaced is not None else []


def config_of(model: nn.Module) -> Config | None:
    """The configuration a model is compiled with, or None."""
    undo = _undo_of(model)
    return undo.config if undo is not None else None


def options_of(config: Config) -> dict[str, Any]:
    """A configuration as the `options` of `torch.compile`."""
    return {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}


def _compiled_call(layer: nn.Module, name: str, config: Config) -> Callable:
    inner = layer._call_impl
    warn = functools.cache(functools.partial(_warn_about_gradients, name))
    compiled = torch.compile(inner, backend="ple", dynamic=True, options=options_of(config))

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside an outer compilation the layer is traced as part of it
            return inner(*args, **kwargs)
        if torch.is_grad_enabled() and _records_gradients(layer, args, kwargs):
            warn()
            return inner(*args, **kwargs)
        with records.region(name):
            return compiled(*args, **kwargs)

    return call


def _records_gradients(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether autograd follows this call: through parameters, as they are now, or through what comes in."""
    if any(parameter.requires_grad for parameter in layer.parameters()):
        return True
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in upstream.tree_leaves((args, kwargs)))


def _warn_about_gradients(name: str) -> None:
    log.warning(
        "%s runs as plain PyTorch: gradients are recorded, and the compiled regions are for inference. Call the model "
        "under torch.no_grad() or torch.inference_mode(), as generate() does",
        name or "the model",
    )


class _CompiledCallHook:
    """transformers' `get_compiled_call`: the decode step of `generate`, with this backend in the place of Inductor.

    What a `CompileConfig` says itself is kept: its options, Inductor's where it names Inductor, and where neither they
    nor the model's configuration have a mode, its mode. All else is as the model was compiled. On a copy of a compiled
    model, which is not compiled, it is the class's own.
    """

    def __init__(self, model: nn.Module):
        self.model = model

    def __call__(self, compile_config: Any) -> Callable:
        model: Any = self.model
        config = config_of(model)
        chosen = copy.copy(compile_config) if compile_config is not None else model._default_compile_config()
        if config is not None and chosen.backend in ("inductor", "ple"):
            own = chosen.options or {}
            if chosen.backend == "inductor":
                own = {"inductor": {**config.inductor, **own}}
            if config.mode == "default" and chosen.mode is not None:
                own = {"mode": chosen.mode, **own}
            chosen.backend, chosen.mode, chosen.options = "ple", None, {**options_of(config), **own}
        return type(model).get_compiled_call(model, chosen)
