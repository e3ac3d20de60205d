"""Settings of the backend: one frozen dataclass, checked where it is made."""

import dataclasses
import difflib
import os
import pathlib
from dataclasses import dataclass, field
from typing import Any

from ple_compile import upstream

_TYPES: dict[Any, type] = {bool: bool, str: str, dict[str, Any]: dict}
ETP_LOWERINGS = ("auto", "all_reduce", "reduce_scatter", "all_to_all", "peer")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of `backend="ple"`; every field is an option of `torch.compile(..., options={...})`.

    merge_kv_proj: on a GPU one matrix product for key and value projections, whose weights then share one storage.
    fuse_ngram_ids: n-gram ids in one kernel.
    fuse_gate: gate, key norm, query norm and convolution norm in one kernel.
    fuse_short_conv: dilated short convolution with its activation in one kernel.
    merge_gate_conv: the gate, the short convolution, the residual sums and the state update as one op.
    fuse_lookup: gather and dequantise the rows of a quantised table in one kernel.
    prefetch_lookup: start lookups in a host table ahead of their use, on a side stream.
    lower_lookup: look rows of a sharded table up by the lowering `etp_lowering`.
    prefetch_distance: how many layers ahead a lookup in a host table starts, at least 1, or "earliest".
    offload: page-lock a table that lies in pageable host memory when it is met; otherwise such a table is looked up on
        the CPU, with one warning. `ple_compile.offload_tables` does it beforehand.
    etp_lowering: "auto", "all_reduce", "reduce_scatter", "all_to_all" or "peer".
    etp_max_tokens: the most tokens that a rank looks up in one step, where ranks have tokens of their own and the
        lowering pads them ("all_reduce", "reduce_scatter"); more is an error on every rank. The same on all ranks.
    mode: Inductor's mode ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs").
        It is a field because `torch.compile` refuses `mode` and `options` together.
    debug: check on the host that the ids of fused lookups in host and quantised tables lie inside the table, and that
        the context of packed requests holds no placeholder; a wrong value is named in a ValueError. Waits for the
        device at each check.
    strict: raise when a pass that applies to a graph declined, instead of leaving that part to Inductor.
    indexer: let `ple_compile.compile` replace the loop over queries in transformers' QSA indexer by tensor operations
        that select the same tokens, but the first of blocks whose scores are exactly equal, of which the loop takes any
        (`ple_compile.whole_graph.indexer` has the contract). The backend alone does not read it.
    whole_graph: let `ple_compile.compile` put forwards that one graph can hold on transformers' Qwen4Exp and compile
        the whole text model, rather than each PLE layer by itself. In bf16 the rest of the model then rounds as
        Inductor does, so tokens may differ from eager's. The backend alone does not read it.
    inductor: options passed through to Inductor, e.g. {"max_autotune": True}.

    Raises ValueError for an unknown field, saying what was probably meant, and for an unknown mode or a value of the
    wrong type, also of an option of Inductor.
    """

    merge_kv_proj: bool = True
    fuse_ngram_ids: bool = True
    fuse_gate: bool = True
    fuse_short_conv: bool = True
    merge_gate_conv: bool = True
    fuse_lookup: bool = True
    prefetch_lookup: bool = True
    lower_lookup: bool = True
    prefetch_distance: int | str = 1
    offload: bool = False
    etp_lowering: str = "auto"
    etp_max_tokens: int = 8192
    mode: str = "default"
    debug: bool = False
    strict: bool = False
    indexer: bool = True
    whole_graph: bool = False
    inductor: dict[str, Any] = field(default_factory=dict)

    def __new__(cls, **options: Any) -> "Config":
        # Before __init__, whose TypeError for an unknown field would not say what was meant.
        names = [item.name for item in dataclasses.fields(cls)]
        for name in options:
            if name in names:
                continue
            if name.replace("-", "_") in upstream.inductor_config.get_config_copy():
                raise ValueError(f"{name!r} is an option of Inductor; write options={{'inductor': {{{name!r}: ...}}}}")
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; the options are {', '.join(names)}"
            raise ValueError(f"unknown option {name!r}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            expected = _TYPES.get(item.type)
            if expected is not None and not isinstance(value, expected):
                raise ValueError(
                    f"Config.{item.name} is {value!r}, a {type(value).__name__}; give it a {expected.__name__}"
                )
        for name, known_values in (("mode", MODES), ("etp_lowering", ETP_LOWERINGS)):
            if getattr(self, name) not in known_values:
                raise ValueError(f"Config.{name} is {getattr(self, name)!r}; it is one of {', '.join(known_values)}")
        if self.prefetch_distance != "earliest" and not _positive(self.prefetch_distance):
            raise ValueError(
                f"Config.prefetch_distance is {self.prefetch_distance!r}; it is a number of layers from 1 on, or "
                "'earliest'"
            )
        if not _positive(self.etp_max_tokens):
            raise ValueError(f"Config.etp_max_tokens is {self.etp_max_tokens!r}; it is a number of tokens from 1 on")
        known = upstream.inductor_config.get_config_copy()
        for name, value in self.inductor.items():
            if not isinstance(name, str):
                raise ValueError(f"Config.inductor has the key {name!r}; its keys are names of Inductor's options")
            if name.replace("-", "_") not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"Config.inductor has {name!r}, which is no option of Inductor{hint}")
            expected = upstream.inductor_type(name.replace("-", "_"))
            # As torch.compile does for its own options: unions and the like are not checked.
            if isinstance(expected, type) and expected is not type(None) and not isinstance(value, expected):
                raise ValueError(
                    f"Config.inductor has {name!r} as {value!r}, a {type(value).__name__}; give it a "
                    f"{expected.__name__}"
                )

    def inductor_patches(self) -> dict[str, Any]:
        """What this configuration changes in Inductor's: its mode, then the options passed through."""
        patches = dict(upstream.list_mode_options(self.mode)) if self.mode != "default" else {}
        return patches | {name.replace("-", "_"): value for name, value in self.inductor.items()}


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def make_config(options: dict[str, Any], mode: str | None = None) -> Config:
    """A `Config` from backend options; `mode` is that of `torch.compile`."""
    return Config(**(options if mode is None else {**options, "mode": mode}))


def user_cache_dir() -> pathlib.Path:
    """The user's cache folder: XDG_CACHE_HOME where it is set."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
