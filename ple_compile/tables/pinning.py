"""Page-locking host memory where it lies, so that the GPU can read it over the bus.

`page_lock` registers a tensor's whole storage with the CUDA driver (about 0.1 s per GB; memory that was never touched
takes its page faults besides); the registration ends when the storage dies. Nothing is copied or moved. Memory shared
between processes can be page-locked by each of them. A storage that has moved to other memory (torch's multiprocessing
puts what it sends into shared memory) is no longer page-locked. All access to the CUDA runtime is in this file.

One call registers the whole storage wherever that is possible: a copy between host and device that spans two
registrations is an invalid argument to CUDA. Kernels do not care.
"""

import contextlib
import logging
import os
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)

# Half of the 512 GiB at which drivers (r580) refuse a single call.
_CALL_BYTES = 256 * 2**30
_PAGE_BYTES = 4096
_PORTABLE = 1  # cudaHostRegisterPortable: valid in every CUDA context of this process


class _Lock(NamedTuple):
    nbytes: int
    storage: weakref.ref[torch.UntypedStorage]
    release: Callable[[], object]

    def is_at(self, address: int) -> bool:
        """Whether the storage still has the memory that was page-locked."""
        storage = self.storage()
        return storage is not None and storage.data_ptr() == address and storage.nbytes() == self.nbytes


# Address -> every page lock of this module.
_LOCKED: dict[int, _Lock] = {}
# The same of memory that someone else page-locked and that has a view.
_VIEWED: dict[int, int] = {}


def available() -> bool:
    return torch.cuda.is_available()


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def is_page_locked(tensor: Tensor) -> bool:
    """True also for a tensor without bytes, of which nothing is read."""
    return not tensor.nbytes or _inside(tensor, _locked()) or tensor.is_pinned()


def is_host_memory(tensor: Tensor) -> bool:
    """True for host tensors and for CUDA views of host memory."""
    return tensor.device.type == "cpu" or _inside(tensor, _locked()) or _inside(tensor, _VIEWED)


def _locked() -> dict[int, int]:
    return {address: lock.nbytes for address, lock in _LOCKED.items() if lock.is_at(address)}


def _inside(tensor: Tensor, ranges: Mapping[int, int]) -> bool:
    address = tensor.data_ptr()
    return any(begin <= address < begin + nbytes for begin, nbytes in ranges.items())


def page_lock(tensor: Tensor, name: str = "table") -> Callable[[], object] | None:
    """Page-lock the storage of a CPU tensor until it dies; returns what releases it before.

    Does nothing, and returns None, when it is page-locked already. Raises ValueError where the driver refuses.
    """
    storage = tensor.untyped_storage()
    address, total = storage.data_ptr(), storage.nbytes()
    if total == 0 or is_page_locked(tensor):
        return None
    for moved in [lock for begin, lock in _LOCKED.items() if not lock.is_at(begin)]:
        moved.release()  # the driver holds those pages, which nobody has any more
    log.info("page-locking %s: %.2f GiB, about %.0f s", name, total / 2**30, _expected_seconds(total))
    started = time.perf_counter()
    locked: list[int] = []
    with _shown(name, total):
        for begin, end in _ranges(address, total):
            status = _host_register(begin, end - begin)
            if status != 0:
                _unregister(locked)
                _clear_cuda_error()
                raise ValueError(_refusal(name, begin - address, total, status))
            locked.append(begin)
    finalizer = weakref.finalize(storage, _release, address, locked, os.getpid())
    finalizer.atexit = False  # the driver releases everything when the process ends
    _LOCKED[address] = _Lock(total, weakref.ref(storage), finalizer)
    log.info("page-locked %s in %.1f s", name, time.perf_counter() - started)
    return finalizer


@contextlib.contextmanager
def all_or_none() -> Iterator[Callable[[Tensor, str], None]]:
    """A `page_lock` of several tensors: what it has page-locked is released if the block raises."""
    with contextlib.ExitStack() as undo:

        def lock(tensor: Tensor, name: str) -> None:
            if (release := page_lock(tensor, name)) is not None:
                undo.callback(release)

        yield lock
        undo.pop_all()


def cuda_view(tensor: Tensor, device: torch.device | str = "cuda", owning: bool = True) -> Tensor:
    """The page-locked tensor as a CUDA tensor on the same memory.

    An owning view keeps the host memory alive; the user of another one does, and checks that it is still page-locked.
    """
    if not is_page_locked(tensor):
        raise ValueError("cuda_view: the tensor lies in pageable memory; page-lock it first")
    if tensor.numel() == 0:
        return tensor.detach().to(device)
    storage = tensor.untyped_storage()
    if not _inside(tensor, _locked()) and storage.data_ptr() not in _VIEWED:
        _VIEWED[storage.data_ptr()] = storage.nbytes()
        weakref.finalize(storage, _VIEWED.pop, storage.data_ptr()).atexit = False
    return torch.as_tensor(_HostBytes(tensor, owning), device=device).view(tensor.dtype).view(tensor.shape)


class _HostBytes:
    """The bytes of a contiguous host tensor for `__cuda_array_interface__`, which knows neither bfloat16 nor float8."""

    def __init__(self, tensor: Tensor, owning: bool):
        if not tensor.is_contiguous():
            raise ValueError(f"cuda_view: strides {tensor.stride()} are not those of a contiguous tensor")
        self._tensor = tensor.detach() if owning else None
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _ranges(address: int, total: int) -> list[tuple[int, int]]:
    """What each call registers; ranges meet at page borders, since a page can be registered once."""
    begin, end, ranges = address, address + total, []
    while begin < end:
        border = (begin + _CALL_BYTES) // _PAGE_BYTES * _PAGE_BYTES
        ranges.append((begin, min(border, end)))
        begin = border
    return ranges


def _release(address: int, begins: list[int], owner: int) -> None:
    del _LOCKED[address]
    if os.getpid() == owner:  # a forked child has the object, not the registration
        _synchronize()  # kernels in flight may still read the memory
        _unregister(begins)


def _unregister(begins: list[int]) -> None:
    for begin in reversed(begins):
        _host_unregister(begin)


@contextlib.contextmanager
def _shown(name: str, total: int) -> Iterator[None]:
    """On a terminal, the time that page-locking takes against the time expected: one call, which tells nothing else."""
    if not sys.stderr.isatty():
        yield
        return
    finished, started = threading.Event(), time.perf_counter()

    def show() -> None:
        while not finished.wait(0.5):
            seconds = time.perf_counter() - started
            filled = min(29, int(30 * seconds / _expected_seconds(total)))
            bar = "#" * filled + "." * (30 - filled)
            sys.stderr.write(f"\rpage-locking {name} ({total / 2**30:.1f} GiB) [{bar}] {seconds:.0f} s")
            sys.stderr.flush()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
        sys.stderr.write("\n")


def _expected_seconds(total: int) -> float:
    return total / 1e9 * 0.1


def _refusal(name: str, done: int, total: int, status: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**30:.2f} GiB"
    return (
        f"page-locking {name} was refused by the CUDA driver (cudaHostRegister error {status}) after "
        f"{done / 2**30:.2f} of {total / 2**30:.2f} GiB; the lock limit of this process (ulimit -l) is {shown}. Raise "
        "it: `ulimit -l unlimited` in the shell, `--ulimit memlock=-1` for docker, LimitMEMLOCK=infinity for systemd, "
        "and give the container or cgroup at least that much memory. A smaller table needs less: "
        "ple_compile.quantize_tables"
    )


def _host_register(address: int, nbytes: int) -> int:
    return torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE).value


def _host_unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def _synchronize() -> None:
    torch.cuda.synchronize()


def _clear_cuda_error() -> None:
    """A refused registration is remembered by the runtime and would be raised by the next, unrelated launch."""
    try:
        torch.ones(1, device="cuda")
    except RuntimeError:
        log.debug("cleared the CUDA error of the refused registration")
