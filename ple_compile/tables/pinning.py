"""Page-locking host memory where it lies, so that the GPU can read it over the bus.

`page_lock` registers a tensor's whole storage with the CUDA driver, in chunks (one call takes about 0.1 s per GB, and
large single calls hit driver limits); the registration ends when the storage dies. Nothing is copied or moved. Memory
shared between processes can be page-locked by each of them. All access to the CUDA runtime is in this file.
"""

import logging
import os
import resource
import sys
import time
import weakref

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_CHUNK_BYTES = 4 * 2**30
_PAGE_BYTES = 4096
_PORTABLE = 1  # cudaHostRegisterPortable: valid in every CUDA context of this process

# Address -> bytes of every storage that this module keeps page-locked.
_LOCKED: dict[int, int] = {}


def available() -> bool:
    return torch.cuda.is_available()


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def is_page_locked(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _LOCKED or tensor.is_pinned()


def is_host_memory(tensor: Tensor) -> bool:
    """True for host tensors and for CUDA views of host memory that `page_lock` locked."""
    return tensor.device.type == "cpu" or tensor.untyped_storage().data_ptr() in _LOCKED


def page_lock(tensor: Tensor, name: str = "table") -> None:
    """Page-lock the storage of a CPU tensor until it dies; does nothing when it is page-locked already."""
    storage = tensor.untyped_storage()
    address, total = storage.data_ptr(), storage.nbytes()
    if total == 0 or is_page_locked(tensor):
        return
    log.info("page-locking %s: %.2f GiB, about %.0f s", name, total / 2**30, total / 1e9 * 0.1)
    started = time.perf_counter()
    locked: list[int] = []
    for begin, end in _chunks(address, total):
        status = _host_register(begin, end - begin)
        if status != 0:
            _unregister(locked)
            _clear_cuda_error()
            raise ValueError(_refusal(name, begin - address, total, status))
        locked.append(begin)
        _show_progress(name, end - address, total)
    _LOCKED[address] = total
    finalizer = weakref.finalize(storage, _release, address, locked, os.getpid())
    finalizer.atexit = False  # the driver releases everything when the process ends
    log.info("page-locked %s in %.1f s", name, time.perf_counter() - started)


def cuda_view(tensor: Tensor, device: torch.device | str = "cuda") -> Tensor:
    """The page-locked tensor as a CUDA tensor on the same memory; keeps the host tensor alive."""
    if not is_page_locked(tensor):
        raise ValueError("cuda_view: the tensor lies in pageable memory; page-lock it first")
    if tensor.numel() == 0:
        return tensor.detach().to(device)
    return torch.as_tensor(_HostBytes(tensor), device=device).view(tensor.dtype).view(tensor.shape)


class _HostBytes:
    """The bytes of a contiguous host tensor for `__cuda_array_interface__`, which knows neither bfloat16 nor float8."""

    def __init__(self, tensor: Tensor):
        if not tensor.is_contiguous():
            raise ValueError(f"cuda_view: strides {tensor.stride()} are not those of a contiguous tensor")
        self._tensor = tensor.detach()
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _chunks(address: int, total: int) -> list[tuple[int, int]]:
    """Address ranges that cover the storage; they meet at page borders, since a page can be registered once."""
    begin, end, ranges = address, address + total, []
    while begin < end:
        border = (begin + _CHUNK_BYTES) // _PAGE_BYTES * _PAGE_BYTES
        ranges.append((begin, min(border, end)))
        begin = border
    return ranges


def _release(address: int, chunks: list[int], owner: int) -> None:
    del _LOCKED[address]
    if os.getpid() == owner:  # a forked child has the object, not the registration
        _synchronize()  # kernels in flight may still read the memory
        _unregister(chunks)


def _unregister(chunks: list[int]) -> None:
    for begin in reversed(chunks):
        _host_unregister(begin)


def _show_progress(name: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        filled = 30 * done // total
        end = "\n" if done == total else ""
        sys.stderr.write(f"\r{name} [{'#' * filled}{'.' * (30 - filled)}] {done / 2**30:.1f} GiB{end}")
        sys.stderr.flush()


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
