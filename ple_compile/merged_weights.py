"""Two parameters moved into one storage, one after the other, so that one GEMM serves both.

`merge` gives both parameters a new home: one buffer of exactly their joint size, each parameter's `.data` pointing at
its half. Nothing else about them changes: same Parameter objects (optimizers and hooks keep working), same names and
shapes in `state_dict`, same version counters, same values. In-place updates and `load_state_dict` write into the
shared buffer. What gives a parameter a storage of its own again (`.data = ...`, `.to(dtype)`, a deep copy,
`load_state_dict(assign=True)`) ends the arrangement, which `merged_view` sees because it looks at addresses each time.
"""

import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

log = logging.getLogger("ple_compile")

# Inductor compiles kernels for 16-byte aligned inputs and copies any input that is not.
_ALIGNMENT = 16
_LOCK = threading.Lock()
# Parameters for which there was no memory: asking again in every call would empty PyTorch's cache each time.
_found_no_memory = WeakTensorKeyDictionary()


def merged_view(first: Tensor, second: Tensor) -> Tensor | None:
    """Both matrices as one [rows, columns] view when `second` starts where `first` ends in the same storage."""
    if second.data_ptr() != first.data_ptr() + first.nbytes or not (first.is_contiguous() and second.is_contiguous()):
        return None
    # Equal addresses alone can be two neighbouring allocations.
    if second.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
        return None
    rows, columns = first.shape[0] + second.shape[0], first.shape[1]
    return first.detach().as_strided((rows, columns), (columns, 1))


def why_never(first: Tensor, second: Tensor) -> str | None:
    """Why the two cannot be one matrix, from their metadata; None when they are, or may become one."""
    pair = (first, second)
    if first.dtype != second.dtype or first.device != second.device:
        return f"different types or devices: {first.dtype} on {first.device}, {second.dtype} on {second.device}"
    if any(tensor.layout != torch.strided or not tensor.is_contiguous() for tensor in pair):
        return "not dense and contiguous"
    if storage_of(first) == storage_of(second):
        end = first.storage_offset() + first.numel()
        return None if second.storage_offset() == end else "tied, or views of one storage"
    if any(tensor.nbytes != tensor.untyped_storage().nbytes() for tensor in pair):
        return "part of a larger storage"
    if first.nbytes == 0 or first.nbytes % _ALIGNMENT:
        return f"the first one's {first.nbytes} bytes would leave the second one unaligned"
    if any(tensor.is_inference() for tensor in pair):
        return "created in inference mode"
    return None


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """What is equal for tensors on one storage, fake ones too."""
    return StorageWeakRef(tensor.untyped_storage())


def why_separate(first: Tensor, second: Tensor) -> str | None:
    """Why `merge` must leave two that are not one matrix alone right now; None when it may move them."""
    pair = (first, second)
    if any(type(tensor) is not torch.nn.Parameter for tensor in pair):
        return "not both plain parameters"
    if first is second or first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr():
        return "tied, or views of one storage"
    if (reason := why_never(first, second)) is not None:
        return reason
    if first in _found_no_memory:
        return "no memory was free for one more copy of them"
    if torch.is_grad_enabled() and (first.requires_grad or second.requires_grad):
        return "autograd is recording"
    if any(_num_aliases(tensor) for tensor in pair):
        return "another tensor shares the storage"
    if first.is_shared() and first.device.type == "cpu":
        return "in memory shared between processes"
    if first.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return None


def merge(first: Tensor, second: Tensor) -> None:
    """Move both parameters into one storage. Call it only when `why_separate` has nothing to say.

    Needs room for one more copy of the pair until it returns, and synchronises a CUDA device once. Where there is no
    room they stay as they are for good, with a warning.
    """
    with _LOCK, torch.inference_mode(False), torch.no_grad():
        if merged_view(first, second) is not None:
            return
        rows = first.shape[0] + second.shape[0]
        try:
            buffer = _allocate((rows, first.shape[1]), first)
        except torch.OutOfMemoryError:
            _found_no_memory[first] = True
            log.warning(
                "merge_kv_proj: %.1f MiB for the key and value projection as one matrix are not free on %s; they stay "
                "two, and two matrix products read them",
                (first.nbytes + second.nbytes) / 2**20,
                first.device,
            )
            return
        halves = buffer.split([first.shape[0], second.shape[0]])
        for tensor, half in zip((first, second), halves):
            half.copy_(tensor)
        if buffer.device.type == "cuda":
            # The old storages are freed below, and the new one is read from whatever stream comes next.
            torch.cuda.synchronize(buffer.device)
        for tensor, half in zip((first, second), halves):
            tensor.data = half


def _num_aliases(tensor: Tensor) -> int:
    """Other tensors on the same storage, which a move would leave behind."""
    # One reference is the tensor's own, one belongs to the wrapper made here.
    aliases = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 2
    if aliases == 0:
        return 0
    # On a compiled function's first call, AOTAutograd checks custom ops for aliasing from a dispatch mode whose frame
    # holds the `.data` of the last argument. That alias goes when the call returns.
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__":
            held = [local for local in frame.f_locals.values() if type(local) is Tensor and not local.is_meta]
            address = tensor.untyped_storage().data_ptr()
            aliases -= len({id(local) for local in held if local.untyped_storage().data_ptr() == address})
        frame = frame.f_back
    return aliases


def _allocate(shape: tuple[int, int], like: Tensor) -> Tensor:
    if like.device.type != "cuda":
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    # A warm-up run of CUDA graph trees sends this thread's allocations to the graphs' pool, where nothing may outlive
    # the run; other threads allocate from the ordinary pool.
    with ThreadPoolExecutor(max_workers=1) as other_thread:
        return other_thread.submit(torch.empty, shape, dtype=like.dtype, device=like.device).result()
