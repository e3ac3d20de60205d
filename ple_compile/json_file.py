"""Small JSON files that other processes may read while they are written."""

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
            json.dump(data, out, indent=1)
        os.replace(partial, file)
    except BaseException:
        pathlib.Path(partial).unlink(missing_ok=True)
        raise
