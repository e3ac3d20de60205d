"""Page-locking: all of the storage, once, until it dies; refusals leave nothing behind."""

import ctypes
import gc
import io
import resource
import time
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # registers how tensors are sent

from ple_compile.tables import pinning


def test_locks_the_whole_storage_until_it_dies(driver):
    tensor = torch.randn(100, 40)
    pinning.page_lock(tensor[10:20])
    assert driver.covers(tensor) and pinning.is_page_locked(tensor) and pinning.is_page_locked(tensor[50:])
    view = tensor[3:4]
    del tensor
    gc.collect()
    assert pinning.is_page_locked(view)
    del view
    gc.collect()
    assert not driver.locked and not pinning._LOCKED


def test_locking_again_does_nothing(driver):
    tensor = torch.randn(100)
    pinning.page_lock(tensor)
    pinning.page_lock(tensor.detach())
    assert len(driver.locked) == 1


def test_swapping_data_releases_the_old_memory(driver):
    parameter = torch.nn.Parameter(torch.randn(100))
    pinning.page_lock(parameter)
    parameter.data = torch.randn(100)
    gc.collect()
    assert not driver.locked and not pinning.is_page_locked(parameter)


def sent(tensor):
    ForkingPickler(io.BytesIO()).dump(tensor)  # as a queue, or the arguments of a process


@pytest.mark.parametrize("move", [sent, lambda t: t.share_memory_(), lambda t: t.untyped_storage().resize_(0)])
def test_a_storage_that_moved_is_not_page_locked(driver, move):
    """The same storage object then has other memory, and the old addresses may soon be someone else's."""
    tensor = torch.randn(100)
    pinning.page_lock(tensor)
    (old,) = driver.locked
    alias = torch.frombuffer((ctypes.c_char * 400).from_address(old), dtype=torch.float32)
    assert pinning.is_page_locked(alias)
    move(tensor)
    assert not pinning.is_page_locked(tensor) and not pinning.is_page_locked(alias)
    other = torch.randn(100)
    pinning.page_lock(other)
    assert list(driver.locked) == [other.data_ptr()] == list(pinning._LOCKED)
    if tensor.untyped_storage().nbytes():
        pinning.page_lock(tensor)
        assert driver.covers(tensor) and pinning.is_page_locked(tensor)
    del tensor
    gc.collect()
    assert list(driver.locked) == [other.data_ptr()] == list(pinning._LOCKED)


def test_one_call_for_one_table(driver):
    """Copies that span two registrations fail."""
    tensor = torch.empty(2**26, dtype=torch.uint8)
    pinning.page_lock(tensor)
    assert driver.locked == {tensor.data_ptr(): tensor.nbytes}


def test_calls_that_would_be_too_large_are_split_at_page_borders(driver, monkeypatch):
    monkeypatch.setattr(pinning, "_CALL_BYTES", 8192)
    tensor = torch.empty(50_001, dtype=torch.uint8)
    pinning.page_lock(tensor)
    assert driver.covers(tensor) and len(driver.locked) > 5
    borders = sorted(driver.locked)[1:]
    assert all(address % 4096 == 0 for address in borders)
    assert sum(driver.locked.values()) == tensor.nbytes
    del tensor
    gc.collect()
    assert not driver.locked


def test_a_refusal_says_what_to_raise_and_undoes_what_was_done(driver, monkeypatch):
    monkeypatch.setattr(pinning, "_CALL_BYTES", 8192)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2**23, 2**23))
    driver.refuse_after = 30_000
    tensor = torch.empty(50_001, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match=r"page-locking big was refused .*error 2.*ulimit -l\) is 0.01 GiB.*memlock=-1"
    ):
        pinning.page_lock(tensor, "big")
    assert not driver.locked and driver.cleared == 1 and not pinning.is_page_locked(tensor)
    driver.refuse_after = None
    pinning.page_lock(tensor)
    assert driver.covers(tensor)


def test_an_empty_tensor_needs_no_lock(driver):
    empty = torch.empty(0, 8)
    pinning.page_lock(empty)
    assert not driver.locked and pinning.is_page_locked(empty)


def test_no_view_of_pageable_memory():
    with pytest.raises(ValueError, match="pageable"):
        pinning.cuda_view(torch.randn(4, 4))


def test_a_view_of_a_part_is_host_memory_too(driver):
    """Such a view has a storage of its own, which begins inside the registered one."""
    tensor = torch.randn(100, 8)
    pinning.page_lock(tensor)
    part = torch.frombuffer(tensor.numpy().data, dtype=torch.float32)[80:]
    alias = torch.frombuffer(part.numpy().data, dtype=torch.float32)
    assert alias.untyped_storage().data_ptr() != tensor.data_ptr()
    assert pinning.is_page_locked(alias) and not pinning.is_page_locked(torch.randn(4))


def test_a_terminal_shows_the_time_against_the_time_expected(driver, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    register = driver.register
    monkeypatch.setattr(pinning, "_host_register", lambda *args: time.sleep(0.7) or register(*args))
    pinning.page_lock(torch.randn(4, 4), "model.table")
    assert "page-locking model.table (0.0 GiB) [#" in capsys.readouterr().err


def test_progress_is_logged(driver, caplog):
    caplog.set_level("INFO", logger="ple_compile")
    tensor = torch.randn(4, 4)
    pinning.page_lock(tensor, "model.table")
    assert "page-locking model.table" in caplog.text and "page-locked model.table in" in caplog.text
