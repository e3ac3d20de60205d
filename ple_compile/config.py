"""Settings of the backend: one frozen dataclass, checked where it is made."""

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from ple_compile import upstream

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of `backend="ple"`; every field is an option of `torch.compile(..., options={...})`.

    merge_kv_proj: one matrix product for the key and value projections, whose weights then share one storage.
    fuse_ngram_ids: n-gram ids in one kernel.
    fuse_gate: gate, key norm, query norm and convolution norm in one kernel.
    fuse_short_conv: dilated short convolution with its activation in one kernel.
    merge_gate_conv: the gate, the short convolution, the residual sums and the state update as one op.
    mode: Inductor's mode ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs").
        It is a field because `torch.compile` refuses `mode` and `options` together.
    strict: raise when a pass that applies to a graph declined, instead of leaving that part to Inductor.
    inductor: options passed through to Inductor, e.g. {"max_autotune": True}.

    Raises ValueError for an unknown mode or a value of the wrong type.
    """

    merge_kv_proj: bool = True
    fuse_ngram_ids: bool = True
    fuse_gate: bool = True
    fuse_short_conv: bool = True
    merge_gate_conv: bool = True
    mode: str = "default"
    strict: bool = False
    inductor: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            expected: type = bool if item.type is bool else str if item.type is str else dict
            if not isinstance(value, expected):
                raise ValueError(
                    f"Config.{item.name} is {value!r}, a {type(value).__name__}; give it a {expected.__name__}"
                )
        if self.mode not in MODES:
            raise ValueError(f"Config.mode is {self.mode!r}; it is one of {', '.join(MODES)}")
        known = upstream.inductor_config.get_config_copy()
        for name in self.inductor:
            if name.replace("-", "_") not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"Config.inductor has {name!r}, which is no option of Inductor{hint}")

    def inductor_patches(self) -> dict[str, Any]:
        """What this configuration changes in Inductor's: its mode, then the options passed through."""
        patches = dict(upstream.list_mode_options(self.mode)) if self.mode != "default" else {}
        return patches | {name.replace("-", "_"): value for name, value in self.inductor.items()}


def make_config(options: dict[str, Any], mode: str | None = None) -> Config:
    """A `Config` from backend options; an unknown name raises a ValueError that says what was probably meant."""
    names = [item.name for item in dataclasses.fields(Config)]
    for name in options:
        if name in names:
            continue
        if name.replace("-", "_") in upstream.inductor_config.get_config_copy():
            raise ValueError(f"{name!r} is an option of Inductor; write options={{'inductor': {{{name!r}: ...}}}}")
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; the options are {', '.join(names)}"
        raise ValueError(f"unknown option {name!r}{hint}")
    if mode is not None:
        options = {**options, "mode": mode}
    return Config(**options)
