"""Small JSON files that other processes may read while they are written, each with a checksum of what it holds."""

import hashlib
import json
import os
import pathlib
import tempfile
from typing import Any


def write_json(file: pathlib.Path, data: Any) -> None:
    """Write `data` so that a reader, or a process that is killed meanwhile, has the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(handle, "w") as out:
            out.write(with_checksum(data))
        os.replace(partial, file)
    except BaseException:
        pathlib.Path(partial).unlink(missing_ok=True)
        raise


def with_checksum(data: Any) -> str:
    """The text of a file that holds `data`."""
    return json.dumps({"sha256": _checksum(data), "data": data}, indent=1)


def read_json(file: pathlib.Path) -> Any:
    """What a file with such a text holds. Raises OSError where it cannot be read, ValueError where it is damaged."""
    try:
        found = json.loads(file.read_bytes())
        data = found["data"]
        whole = found["sha256"] == _checksum(data)
    except (ValueError, LookupError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise ValueError("it is damaged")
    return data


def _checksum(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
