"""The index of a checkpoint directory: which file has which tensor."""

import json
from pathlib import Path

INDEX = "model.safetensors.index.json"


def read_index(directory: Path) -> dict[str, str] | None:
    """Tensor names to file names; None without an index, ValueError for one that is damaged."""
    index = directory / INDEX
    if not index.exists():
        return None
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        if all(isinstance(file, str) for file in weight_map.values()):
            return dict(weight_map)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError(f"{index} is damaged: it has no weight_map from tensor names to file names; download it again")
