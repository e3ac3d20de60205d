"""A stand-in for the CUDA driver: records what is page-locked, can refuse; views are the tables themselves."""

import ctypes
import gc

import pytest
import torch

from ple_compile.tables import pinning


class FakeDriver:
    def __init__(self):
        self.locked, self.refuse_after, self.cleared = {}, None, 0

    def register(self, address, nbytes):
        if self.refuse_after is not None and sum(self.locked.values()) + nbytes > self.refuse_after:
            return 2
        assert not any(a < address + nbytes and address < a + n for a, n in self.locked.items()), "locked twice"
        self.locked[address] = nbytes
        return 0

    def unregister(self, address):
        del self.locked[address]

    def clear_error(self):
        self.cleared += 1

    def covers(self, tensor):
        """Every byte of the tensor is page-locked."""
        position, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        for address, nbytes in sorted(self.locked.items()):
            if address <= position < address + nbytes:
                position = address + nbytes
        return position >= end


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(pinning, "available", lambda: True)
    monkeypatch.setattr(pinning, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(pinning, "_host_register", fake.register)
    monkeypatch.setattr(pinning, "_host_unregister", fake.unregister)
    monkeypatch.setattr(pinning, "_synchronize", lambda: None)
    monkeypatch.setattr(pinning, "_clear_cuda_error", fake.clear_error)
    yield fake
    gc.collect()  # what this driver locked, it releases


@pytest.fixture
def views(driver, monkeypatch):
    """Views of page-locked tables are the tables themselves; lists which were asked for."""
    asked = []

    def cuda_view(table, device, owning=True):
        assert pinning.is_page_locked(table) and torch.device(device).type == "cpu"
        asked.append(table.data_ptr())
        if owning:
            return table.detach()
        memory = (ctypes.c_char * table.nbytes).from_address(table.data_ptr())
        return torch.frombuffer(memory, dtype=table.dtype).view(table.shape)

    monkeypatch.setattr(pinning, "cuda_view", cuda_view)
    return asked
