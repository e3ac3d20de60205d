"""An embedding whose table stays in its files, for hosts with less memory than the table."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ple_compile.ops.mapped_lookup  # noqa: F401  (registers the operator)
from ple_compile.tables.formats import CheckedScales, QuantizedEmbedding
from ple_compile.tables.mapped_rows import MappedRows

log = logging.getLogger("ple_compile")


class MappedEmbedding(CheckedScales):
    """Looks rows up in mapped files, plain ones or those of a quantised format.

    `weight` has no rows: it only says on which device ids are expected and of what type rows are. A state dict with a
    real table does not fit it, and its own has no rows, which a warning says once. `save_tables` writes the table from
    its files.
    """

    def __init__(
        self,
        rows: dict[str, MappedRows],
        singles: dict[str, Tensor],
        quantized: type[QuantizedEmbedding] | None,
        embedding_dim: int,
        dtype: torch.dtype,
    ):
        num_rows = rows["weight"].num_rows
        super().__init__(num_rows, embedding_dim, _weight=torch.empty(num_rows, embedding_dim, device="meta"))
        self.weight = nn.Parameter(torch.empty(0, embedding_dim, dtype=dtype), requires_grad=False)
        self.rows, self.quantized, self._told = rows, quantized, False
        self._number_lookups()
        self.scale_names = tuple(singles)
        for name, tensor in singles.items():
            self._put_single(name, tensor)

    def _number_lookups(self) -> None:
        self._lookups = [(name, r.number, r.width, r.dtype) for name, r in self.rows.items()]

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._number_lookups()  # another process numbers its tables anew

    def _put_single(self, name: str, tensor: Tensor) -> None:
        """In the type and shape that a table in memory has."""
        assert self.quantized is not None
        dtype, shape = self.quantized.spec(self.num_embeddings, self.embedding_dim)[name]
        setattr(self, name, nn.Parameter(tensor.to(dtype).reshape(shape), requires_grad=False))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: getattr(self, name).detach() for name in self.scale_names}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            if getattr(self, name).dtype != tensor.dtype:
                self._put_single(name, tensor.to(getattr(self, name).device))
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self._told:
            log.warning("%sweight stays in its files and has no rows in a state dict; save_tables writes them", prefix)
            self._told = True

    def forward(self, input: Tensor) -> Tensor:
        scales = self.checked_scales()
        stored = {
            name: torch.ops.ple.mapped_lookup(number, input, width, dtype)
            for name, number, width, dtype in self._lookups
        }
        if self.quantized is None:
            return stored["weight"].to(self.weight.dtype)
        stored |= {name: scale.to(input.device) for name, scale in scales.items()}
        return self.quantized.decode(stored, self.weight.dtype)

    def extra_repr(self) -> str:
        files = {part.file for rows in self.rows.values() for part in rows.parts}
        return f"{self.num_embeddings}, {self.embedding_dim}, mapped from {len(files)} files"
