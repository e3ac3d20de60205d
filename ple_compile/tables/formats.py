"""Quantised n-gram tables as plain PyTorch embeddings: gather the stored bytes, then dequantise.

    fp8       weight e4m3 [R, D], weight_scale float32 [1]               row = weight * weight_scale
    fp8_row   weight e4m3 [R, D], weight_scale float32 [R, 1]            row = weight * weight_scale[row]
    nvfp4     weight uint8 [R, D / 2], two e2m1 values a byte, the first in the low bits; weight_scale e4m3
              [R, D / 16]; weight_scale_2 float32 [1]                    row = weight * weight_scale * weight_scale_2

Products are taken in float32 and every row is rounded once, to the activation type. Moving a module to another floating
type changes the activation type and never what is stored. `fp8` has the parameter names of transformers'
`FP8Embedding`, which gives the same rows: in float32 from the same scale, and in a model of 16 bits, for which it casts
the scale, wherever that type holds the scale. `quantize_tables` chooses such scales.

Scales start as NaN, after `to_empty` from the meta device too, so one that was never loaded is told from one that is
1.0 (`scales`).
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ple_compile.tables.scales import check_once, check_scale, scales_of

log = logging.getLogger("ple_compile")

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9
E2M1_MAX = 6.0
NVFP4_GROUP = 16

Spec = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class CheckedScales(nn.Embedding):
    """Refuses wrong scales at its first lookup, and at the first after each change."""

    scale_names: tuple[str, ...]

    def checked_scales(self) -> dict[str, Tensor]:
        """The scales by name. Compiled code is checked from outside (`graph_scales`)."""
        scales = scales_of(self, "the table")
        if not torch.compiler.is_compiling():
            for key, scale in scales.items():
                check_once(f"the {key} of the table", scale)
        return scales

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {key: self._parameters.get(key) for key in self.scale_names}
        super()._apply(fn, recurse)
        for key, old in before.items():
            scale = self._parameters.get(key)
            if old is not None and old.is_meta and scale is not None and not scale.is_meta:
                scale.detach().fill_(torch.nan)  # `to_empty`: memory with anything in it
        return self


class QuantizedEmbedding(CheckedScales):
    """What the formats share. `row_parameters` have one row for each row of the table."""

    format: ClassVar[str]
    row_parameters: ClassVar[tuple[str, ...]]
    weight_scale: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        shape_only = torch.empty(num_embeddings, embedding_dim, device="meta")
        super().__init__(num_embeddings, embedding_dim, padding_idx, _weight=shape_only, _freeze=True)
        self.activation_dtype = dtype or torch.get_default_dtype()
        for name, (kind, shape) in self.spec(num_embeddings, embedding_dim).items():
            tensor = torch.empty(shape, dtype=kind, device=device)
            if name != "weight":
                tensor.fill_(torch.nan)
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    @classmethod
    def spec(cls, rows: int, width: int) -> Spec:
        """Type and shape of every parameter."""
        raise NotImplementedError

    @classmethod
    def table_scale(cls, largest: float) -> Tensor | None:
        """float32 [1] for a table whose largest absolute value is `largest`; None for a format without such a scale."""
        raise NotImplementedError

    @classmethod
    def encode(cls, rows: Tensor, table_scale: Tensor | None) -> dict[str, Tensor]:
        """The `row_parameters` of finite rows [n, D]."""
        raise NotImplementedError

    @classmethod
    def decode(cls, stored: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Rows of stored parameters, row parameters [..., *] gathered already."""
        raise NotImplementedError

    @property
    def table_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that are not row by row."""
        return tuple(name for name in self._parameters if name not in self.row_parameters)

    def forward(self, input: Tensor) -> Tensor:
        scales = self.checked_scales()
        # The weight through nn.Embedding, in whose place a sharded table puts its own lookup.
        rows = super().forward(input)
        stored = {"weight": rows}
        for name, scale in scales.items():
            if name in self.row_parameters:
                scale = F.embedding(input.to(scale.device), scale)
            stored[name] = scale.to(rows.device)  # it moves with the model; an offloaded table does not
        return self.decode(stored, self.activation_dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def without_conversion(tensor: Tensor) -> Tensor:
            # A cast of the module leaves integers alone, so the bytes pass as such.
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
            return fn(tensor.view(bits)).view(tensor.dtype)

        self.activation_dtype = fn(torch.empty(0, dtype=self.activation_dtype)).dtype
        return super()._apply(without_conversion, recurse)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        _tell_how_to_load(f"{prefix}weight", self.format)

    def _load_from_state_dict(
        self,
        state_dict: dict,
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing: list,
        extra: list,
        errors: list,
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, extra, errors)
        try:
            for name, scale in scales_of(self, f"{prefix}weight").items():
                check_scale(f"the {name} of {prefix}weight", scale)
        except ValueError as error:
            errors.append(str(error))

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format}, dtype={self.activation_dtype}"


@functools.cache
def _tell_how_to_load(name: str, format: str) -> None:
    log.warning(
        "the state dict holds %s as stored in %s, beside its scales; load it into a table of that format, or by "
        "ple_compile.load_tables: transformers' from_pretrained takes the stored numbers for the values",
        name,
        format,
    )


class FP8Embedding(QuantizedEmbedding):
    """e4m3 with one float32 scale."""

    format = "fp8"
    row_parameters, scale_names = ("weight",), ("weight_scale",)

    @classmethod
    def spec(cls, rows: int, width: int) -> Spec:
        return {"weight": (E4M3, (rows, width)), "weight_scale": (torch.float32, (1,))}

    @classmethod
    def table_scale(cls, largest: float) -> Tensor:
        # The eight bits of a bfloat16, so that a cast keeps it; cut, so that no row decodes beyond the largest value.
        return _spread(largest, E4M3_MAX).view(torch.int32).bitwise_and(-(2**16)).view(torch.float32)

    @classmethod
    def encode(cls, rows: Tensor, table_scale: Tensor | None) -> dict[str, Tensor]:
        assert table_scale is not None
        return {"weight": _to_e4m3(rows.float() / table_scale)}

    @classmethod
    def decode(cls, stored: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        return (stored["weight"].to(torch.float32) * stored["weight_scale"]).to(dtype)


class RowScaledFP8Embedding(QuantizedEmbedding):
    """e4m3 with a float32 scale for every row."""

    format = "fp8_row"
    row_parameters, scale_names = ("weight", "weight_scale"), ("weight_scale",)

    @classmethod
    def spec(cls, rows: int, width: int) -> Spec:
        return {"weight": (E4M3, (rows, width)), "weight_scale": (torch.float32, (rows, 1))}

    @classmethod
    def table_scale(cls, largest: float) -> None:
        return None

    @classmethod
    def encode(cls, rows: Tensor, table_scale: Tensor | None) -> dict[str, Tensor]:
        rows = rows.float()
        largest = rows.abs().amax(dim=1, keepdim=True)
        smallest = torch.finfo(torch.float32).tiny
        # A tensor divisor: CUDA divides by a number by multiplying with its reciprocal, which rounds otherwise.
        scale = torch.where(largest == 0, 1.0, (largest / torch.full_like(largest, E4M3_MAX)).clamp_min(smallest))
        return {"weight": _to_e4m3(rows / scale), "weight_scale": scale}

    @classmethod
    def decode(cls, stored: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        return (stored["weight"].to(torch.float32) * stored["weight_scale"]).to(dtype)


class NVFP4Embedding(QuantizedEmbedding):
    """e2m1 with an e4m3 scale for every 16 values and a float32 scale for the table."""

    format = "nvfp4"
    row_parameters, scale_names = ("weight", "weight_scale"), ("weight_scale", "weight_scale_2")

    @classmethod
    def spec(cls, rows: int, width: int) -> Spec:
        if width % NVFP4_GROUP:
            raise ValueError(f"nvfp4: rows of {width} values are not whole groups of {NVFP4_GROUP}; use fp8")
        return {
            "weight": (torch.uint8, (rows, width // 2)),
            "weight_scale": (E4M3, (rows, width // NVFP4_GROUP)),
            "weight_scale_2": (torch.float32, (1,)),
        }

    @classmethod
    def table_scale(cls, largest: float) -> Tensor:
        return _spread(largest, E2M1_MAX * E4M3_MAX)

    @classmethod
    def encode(cls, rows: Tensor, table_scale: Tensor | None) -> dict[str, Tensor]:
        assert table_scale is not None
        groups = rows.float().unflatten(1, (-1, NVFP4_GROUP)) / table_scale
        # No scale of 0: a group too small for the table's scale keeps what a step of the smallest scale can hold.
        scale = _to_e4m3((groups.abs().amax(dim=2) / E2M1_MAX).clamp_min(E4M3_TINY))
        codes = _to_e2m1(groups / scale.float().unsqueeze(2)).flatten(1)
        return {"weight": codes[:, 0::2] | (codes[:, 1::2] << 4), "weight_scale": scale}

    @classmethod
    def decode(cls, stored: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed = stored["weight"]
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        values = decode_e2m1(codes).unflatten(-1, (-1, NVFP4_GROUP))
        scaled = values * stored["weight_scale"].to(torch.float32).unsqueeze(-1)
        return (scaled.flatten(-2) * stored["weight_scale_2"]).to(dtype)


FORMATS: dict[str, type[QuantizedEmbedding]] = {
    cls.format: cls for cls in (FP8Embedding, RowScaledFP8Embedding, NVFP4Embedding)
}


def format_class(name: str) -> type[QuantizedEmbedding]:
    if name not in FORMATS:
        raise ValueError(f"table format {name!r} is unknown; it is one of {', '.join(FORMATS)}")
    return FORMATS[name]


def decode_e2m1(codes: Tensor) -> Tensor:
    """float32 values of 4-bit codes (uint8): sign, two exponent bits, one mantissa bit.

    The bits are put where a float16 has them, which gives values that are 2**14 too small, exactly.
    """
    bits = codes.to(torch.int16)
    return (((bits & 8) << 12) | ((bits & 7) << 9)).view(torch.float16).to(torch.float32) * 2.0**14


# Half-way between two codes, ties to the even one: a border above which the odd code ends is the next float32.
_E2M1_BORDERS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_E2M1_BORDERS[0::2] = _E2M1_BORDERS[0::2].nextafter(torch.tensor(torch.inf))


def _to_e2m1(values: Tensor) -> Tensor:
    """The nearest codes of float32 values, out of range to +-6."""
    borders = _E2M1_BORDERS.to(values.device)
    code = torch.bucketize(values.abs(), borders, right=True, out_int32=True).to(torch.uint8)
    return code | (values.signbit().to(torch.uint8) << 3)


def _spread(largest: float, codes: float) -> Tensor:
    """The float32 scale [1] that spreads codes up to `codes` over values up to `largest`; 1 for a table of zeros."""
    scale = max(largest / codes, torch.finfo(torch.float32).tiny) if largest else 1.0
    return torch.tensor([scale], dtype=torch.float32)


def _to_e4m3(values: Tensor) -> Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
