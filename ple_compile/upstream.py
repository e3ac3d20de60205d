"""Every private part of PyTorch that this package uses, in one place.

When a new PyTorch release moves one of them, this file and `tests/test_upstream.py` are what breaks, by name.
"""

import inspect
import re
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._guards import CompileContext, detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table as decompositions
from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.graph_transform_observer import GraphTransformObserver
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = [
    "as_written",
    "CustomGraphPass",
    "FakeTensor",
    "GraphTransformObserver",
    "cache_dir",
    "cache_hits",
    "compile_fx",
    "control_deps",
    "counters",
    "cpp_rounds_as_eager",
    "custom_passes",
    "decompositions",
    "detect_fake_mode",
    "expression",
    "fake_on",
    "fingerprint",
    "free_symbols",
    "graph_break",
    "guards_hold",
    "is_backed",
    "is_compiled",
    "is_last_graph",
    "is_unbacked",
    "inductor_config",
    "inductor_settings",
    "inductor_type",
    "input_index",
    "input_name",
    "list_mode_options",
    "no_dispatch_modes",
    "preserve_node_ordering",
    "reset_dynamo",
    "set_dynamo",
    "size_in_symbols",
    "stable_topological_sort",
    "substitute",
    "run_custom_pass",
    "symbol_hint",
    "symbol_range",
    "trace_artifact",
    "tree_leaves",
]


def no_dispatch_modes() -> Any:
    """Context in which ops run on real tensors although fake, proxy or functional modes are active outside."""
    return _disable_current_modes()


def cache_hits() -> int:
    """How many graphs this process has taken from PyTorch's compile caches."""
    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


_LIMITS = ("recompile_limit", "accumulated_recompile_limit")
_NO_HOOK_GUARDS = "skip_nnmodule_hook_guards"
_settings_before: dict[str, Any] | None = None
_num_set = 0


def set_dynamo(limit: int) -> None:
    """Let each call of this have `limit` graphs: past its limit Dynamo runs a function eagerly, with one warning.

    Every module is called through the same function, so its graphs are those of all models together. Dynamo keeps them
    when a model is restored, so calls are counted for as long as the process lives. For the same reason a module's
    hooks are guarded, which Dynamo leaves out: a layer without hooks would run the graph of one with them.
    """
    global _settings_before, _num_set
    _num_set += 1
    if _settings_before is None:
        _settings_before = {name: getattr(dynamo_config, name) for name in (*_LIMITS, _NO_HOOK_GUARDS)}
    for name in _LIMITS:
        setattr(dynamo_config, name, max(getattr(dynamo_config, name), limit * _num_set))
    setattr(dynamo_config, _NO_HOOK_GUARDS, False)


def reset_dynamo() -> None:
    """Undo `set_dynamo`, but for its count."""
    global _settings_before
    for name, value in (_settings_before or {}).items():
        setattr(dynamo_config, name, value)
    _settings_before = None


def is_last_graph() -> bool:
    """Whether Dynamo compiles the last graph that it keeps of one function."""
    graph = CompileContext.current_compile_id()
    number = None if graph is None else graph.frame_compile_id
    return number is not None and number + 1 == dynamo_config.recompile_limit


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module itself, not one inside it, was given to `torch.compile`: in whichever of three ways."""
    compiled_forward = hasattr(vars(module).get("forward"), "get_compiler_config")  # its wrapper has one, too
    return compiled_forward or module._compiled_call_impl is not None


def inductor_settings(patches: dict[str, Any]) -> str:
    """What of Inductor's configuration, with `patches`, is part of its cache key."""
    with inductor_config.patch(patches):
        return repr(sorted(inductor_config.save_config_portable().items()))


def inductor_type(name: str) -> Any:
    """The type of an option of Inductor: a class, or a union and the like."""
    return inductor_config.get_type(name)  # type: ignore[attr-defined]


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Write a text into the structured trace that tlparse reads (`TORCH_TRACE=folder`), where there is one."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


def custom_passes(value: Any) -> list[Callable]:
    """Inductor's custom pass setting as a list (None, one pass, or, from torch 2.13, a sequence)."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def run_custom_pass(function: Callable, graph: torch.fx.Graph, *, is_inference: bool) -> None:
    """Call a user's post-grad pass the way Inductor does (inference-aware passes exist from torch 2.12)."""
    if "is_inference" in inspect.signature(function).parameters:
        function(graph, is_inference=is_inference)
    else:
        function(graph)


def fake_on(fake: FakeTensor, device: torch.device) -> torch.Tensor:
    """A fake tensor like `fake` on another device."""
    with fake.fake_mode:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device)


def graph_break(gm: torch.fx.GraphModule) -> str:
    """Why Dynamo ended this graph and at which line; empty when it ended with the function."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    where = f" ({reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno})" if reason.user_stack else ""
    return f"{reason.reason.strip().splitlines()[0]}{where}"


# What Dynamo calls a local of the function that it compiled: L['self'], or L['args'][0].
LOCAL = re.compile(r"^L\['\w+'\](?:\[\w+\])*\.")


def input_name(placeholder: torch.fx.Node) -> str:
    """What the user calls an input of a Dynamo graph: `L['self'].layers.0.weight`, or the node's name."""
    argument = placeholder.meta.get("grapharg")
    if argument is None or getattr(argument, "source", None) is None:
        return placeholder.name
    name = argument.source.name
    name = name() if callable(name) else name  # a property from torch 2.10
    name = re.sub(r"\._(?:modules|parameters|buffers)(?=\[)", "", name)
    return re.sub(r"(?<!^[LG])\['(\w+)'\]", r".\1", name)


def input_index(placeholder: torch.fx.Node) -> int | None:
    """Which input of the Dynamo graph became this placeholder; None where AOTAutograd does not say."""
    described = placeholder.meta.get("desc")
    return described.idx if isinstance(described, PlainAOTInput) else None


def expression(size: torch.SymInt) -> Any:
    """The sympy expression of a symbolic size, in the symbols that can really vary."""
    return size.node.expr.xreplace(_constants(_shape_env(size)))


def as_written(size: int | torch.SymInt) -> Any:
    """A size as one hashable value, an expression as the graph has it: equal ones are equal sizes."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def size_in_symbols(size: torch.SymInt) -> int | str:
    """A symbolic size as a number, or as an expression in the symbols that can really vary."""
    found = expression(size)
    return int(found) if found.is_number else str(found)


_known_constants: "weakref.WeakKeyDictionary[Any, tuple[int, dict]]" = weakref.WeakKeyDictionary()


def _constants(env: Any) -> dict:
    """Symbols to which the guards leave one value only, without sympy having solved for it.

    Under `dynamic=True` a layer's width is a symbol s with guards such as (s // 32) * 32 == 128 and s % 32 == 0.
    """
    count, known = _known_constants.get(env, (-1, {}))
    if count != len(env.guards):
        hints = {symbol: int(value) for symbol, value in env.backed_var_to_val.items()}
        known = {s: sympy.Integer(h) for s, h in hints.items() if not _can_vary(env, s, h, hints)}
        _known_constants[env] = len(env.guards), known
    return known


def _can_vary(env: Any, symbol: Any, traced: int, hints: dict) -> bool:
    # What the guards solved for is replaced first: under s1 == s0 + 1 both may vary, though not alone.
    exprs = [env.replace(guard.expr) for guard in env.guards if symbol in guard.expr.free_symbols]
    guards = [expr for expr in exprs if symbol in expr.free_symbols]
    others = (traced + 1, traced + 2, traced + 7, 2 * traced, 3 * traced, 4 * traced, traced + 64, traced + 4096)
    return any(all(substitute(expr, {**hints, symbol: other}) != sympy.false for expr in guards) for other in others)


def fingerprint(size: torch.SymInt) -> int | tuple[int, ...]:
    """Values of a symbolic size at two fixed assignments: equal for equal sizes however they are written.

    `s * s // s` and `s` are one size, which sympy does not see; comparing the sizes themselves would add guards.
    """
    expr = expression(size)
    if expr.is_number:  # specialised since the tensor was traced
        return int(expr)
    drawn = ({s: 1009 + 2 * (zlib.crc32(f"{s}{seed}".encode()) % 4096) for s in expr.free_symbols} for seed in "ab")
    return tuple(int(substitute(expr, values)) for values in drawn)


def free_symbols(size: Any) -> set:
    """Sympy symbols of a size; empty for an int."""
    return set(expression(size).free_symbols) if isinstance(size, torch.SymInt) else set()


def _shape_env(size: torch.SymInt) -> Any:
    return size.node.shape_env


def symbol_range(size: torch.SymInt, symbol: Any) -> tuple[int, int]:
    """Lower and upper bound that the guards leave to `symbol` (upper bound capped at 2**31)."""
    bounds = _shape_env(size).var_to_range[symbol]
    upper = 2**31 if bounds.upper > 2**31 else int(bounds.upper)
    return int(bounds.lower), upper


def is_backed(size: torch.SymInt, symbol: Any) -> bool:
    """Whether a symbol had a value when the graph was traced, rather than standing for data (`nonzero`, `unique`)."""
    return symbol in _shape_env(size).backed_var_to_val


def is_unbacked(size: int | torch.SymInt) -> bool:
    """Whether a size stands for data."""
    return isinstance(size, torch.SymInt) and any(not is_backed(size, symbol) for symbol in size.node.expr.free_symbols)


def cpp_rounds_as_eager() -> bool:
    """Whether Inductor's C++ rounds 16-bit values between ops now: told to, and a release that heeds it on a CPU."""
    return inductor_config.emulate_precision_casts and TorchVersion(torch.__version__) >= "2.13"


def symbol_hint(size: torch.SymInt, symbol: Any) -> int:
    """The traced value of one symbol."""
    return int(_shape_env(size).backed_var_to_val[symbol])


def guards_hold(size: torch.SymInt, values: dict) -> bool:
    """Whether every guard recorded so far is true, or undecided, under the assignment `values`."""
    return not any(substitute(guard.expr, values) == sympy.false for guard in _shape_env(size).guards)


def substitute(expr: Any, values: dict) -> Any:
    """`expr` with integers for symbols."""
    return expr.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
