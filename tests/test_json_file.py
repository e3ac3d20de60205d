"""Small JSON files: whole or refused, whatever a disk or a kill has made of them."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from ple_compile.json_file import read_json, with_checksum, write_json

DATA = {"events": [{"name": "fuse_gate", "count": 3, "share": 0.1}], "nonce": "é", "none": None}


def test_what_was_written_is_read(tmp_path: pathlib.Path) -> None:
    write_json(tmp_path / "folder" / "file", DATA)
    assert read_json(tmp_path / "folder" / "file") == DATA


def test_any_changed_or_missing_byte_is_noticed(tmp_path: pathlib.Path) -> None:
    """Unless it is white space, or spells the same in JSON."""
    file, whole = tmp_path / "file", with_checksum(DATA).encode()
    for at in range(len(whole)):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            file.write_bytes(damaged)
            try:
                assert read_json(file) == DATA
            except ValueError as error:
                assert str(error) == "it is damaged"


@pytest.mark.parametrize(
    "content", [b"", b"\xff\x00", b"[]", b"7", b"{}", b"[" * 100_000, with_checksum(1)[:-1].encode()]
)
def test_other_content(tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match="it is damaged"):
        read_json(tmp_path / "file")


KILLED = """
import os, pathlib, signal, sys
from ple_compile import json_file
os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
json_file.write_json(pathlib.Path(sys.argv[1]), "new")
"""


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    write_json(file, "old")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(file)], cwd=os.getcwd())
    assert killed.returncode == -signal.SIGKILL and read_json(file) == "old"
    write_json(file, "new")
    assert read_json(file) == "new"
