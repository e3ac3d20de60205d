"""What `doctor` looks at: one function per subject, each of which gives lines."""

import importlib.metadata
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ple_compile import upstream
from ple_compile.tuning import store

OK, WARNING, MISSING = "ok", "warning", "missing"

# Lowest supported versions, as in pyproject.toml; there is no highest one.
PYTHON = (3, 11)
REQUIRED = {"torch": (2, 11), "triton": (3, 6), "numpy": (0, 0)}
OPTIONAL = {"transformers": ((5, 17), "transformers"), "matplotlib": ((0, 0), "plots")}
_LOWEST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Check:
    name: str
    status: str
    found: str
    remedy: str = ""


def every_check() -> list[Check]:
    subjects = (versions, entry_point, compilers, cache_folders, gpus, cuda_graphs, several_gpus, page_locking, memory)
    return [check for subject in subjects for check in subject()]


def versions() -> Iterator[Check]:
    shown = platform.python_version()
    if sys.version_info >= PYTHON:
        yield Check("Python", OK, shown)
    else:
        yield Check("Python", MISSING, shown, f"install Python {_dotted(PYTHON)} or newer")
    for name, lowest in REQUIRED.items():
        yield _version(name, lowest, f"'{name}>={_dotted(lowest)}'" if any(lowest) else name, MISSING)
    for name, (lowest, extra) in OPTIONAL.items():
        yield _version(name, lowest, f"'ple-compile[{extra}]'", WARNING)


def _version(name: str, lowest: tuple[int, int], wanted: str, otherwise: str) -> Check:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name == "triton" and sys.platform != "linux":
            return Check(name, WARNING, "not installed", "the kernels need Linux; elsewhere PyTorch references run")
        return Check(name, otherwise, "not installed", f"pip install {wanted}")
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if numbers < lowest:
        return Check(name, MISSING, f"{found}, older than {_dotted(lowest)}", f"pip install --upgrade {wanted}")
    return Check(name, OK, found)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def entry_point() -> Iterator[Check]:
    if "ple" in torch.compiler.list_backends():
        yield Check('backend="ple"', OK, "registered")
    else:
        remedy = "install the package (pip install ple-compile); from a checkout: pip install -e ."
        yield Check('backend="ple"', MISSING, "PyTorch does not know it by name", remedy)


def compilers() -> Iterator[Check]:
    wanted = upstream.inductor_config.cpp.cxx[1]
    names = {"C++ compiler": [wanted], "C compiler": ["cc", "gcc", "clang"]}
    for kind, (name, candidates) in zip(("Inductor on CPUs", "Triton"), names.items()):
        found = next((path for path in map(shutil.which, candidates) if path), None)
        remedy = f"{kind} needs one: apt-get install g++, or set {'CXX' if kind.startswith('I') else 'CC'}"
        yield Check(name, OK if found else MISSING, found or f"no {' or '.join(candidates)}", "" if found else remedy)


def cache_folders() -> Iterator[Check]:
    folder = Path(upstream.cache_dir())
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
        yield Check("Inductor's cache", OK, f"{folder}, {_gib(free)} free")
    except OSError as reason:
        remedy = "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written"
        yield Check("Inductor's cache", MISSING, f"{folder}: {reason.strerror}", remedy)
    if torch.cuda.is_available():
        file = store.path(torch.device("cuda", 0))
        yield Check("launch choices", OK, str(file) if file.exists() else "those shipped; `tune` measures on this GPU")


def gpus() -> Iterator[Check]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        remedy = "install a CUDA build of torch (pytorch.org)" if built is None else "see nvidia-smi and the driver"
        found = "none; compiled models run on PyTorch references on the CPU"
        yield Check("GPU", WARNING, found, f"for the kernels: {remedy}")
        return
    yield Check("NVIDIA driver", OK, f"{_driver() or 'version unknown'}, torch built for CUDA {torch.version.cuda}")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found = f"{gpu.name}, sm{gpu.major}{gpu.minor}, {_gib(gpu.total_memory)}"
        if (gpu.major, gpu.minor) < _LOWEST_CAPABILITY:
            yield Check(f"GPU {index}", WARNING, found, "the kernels are made for sm80 and newer")
        else:
            yield Check(f"GPU {index}", OK, found)


def _driver() -> str:
    described = Path("/proc/driver/nvidia/version")
    match = re.search(r"\d+\.\d+(\.\d+)?", described.read_text()) if described.exists() else None
    return match[0] if match else ""


def cuda_graphs() -> Iterator[Check]:
    if not torch.cuda.is_available():
        return
    try:
        x = torch.zeros(1, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x += 1
        graph.replay()
        works = x.item() == 1
    except RuntimeError as reason:
        yield Check("CUDA graphs", MISSING, str(reason).splitlines()[0], "update the driver; mode='default' needs none")
        return
    remedy = "" if works else "a replayed graph gave a wrong result: update the driver"
    yield Check("CUDA graphs", OK if works else MISSING, "captured and replayed", remedy)


def several_gpus() -> Iterator[Check]:
    if not (dist.is_available() and dist.is_nccl_available()):
        yield Check("NCCL", WARNING, "not in this torch", "shard_tables on GPUs needs it: a CUDA build on Linux has it")
    elif torch.cuda.is_available():
        yield Check("NCCL", OK, ".".join(map(str, torch.cuda.nccl.version())))
    count = torch.cuda.device_count()
    if count < 2:
        return
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if without:
        remedy = 'etp_lowering="peer" cannot be used between them; "all_reduce" can. Check nvidia-smi topo -p2p r'
        yield Check("peer access", WARNING, f"not between GPUs {', '.join(without)}", remedy)
    else:
        yield Check("peer access", OK, f"between all {count} GPUs")


def page_locking() -> Iterator[Check]:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        yield Check("page-lock limit", OK, "unlimited")
    else:
        remedy = "offload_tables may be refused: ulimit -l unlimited; docker --ulimit memlock=-1; LimitMEMLOCK=infinity"
        yield Check("page-lock limit", WARNING, f"{_gib(limit)} (ulimit -l)", remedy)


def memory() -> Iterator[Check]:
    described = Path("/proc/meminfo")
    if described.exists():
        sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", described.read_text(), flags=re.M))
        total, free = (int(sizes[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
        yield Check("host memory", OK, f"{_gib(total)}, {_gib(free)} available")
        limit = _container_limit()
        if limit is not None and limit < total:
            remedy = "a table in host memory must fit into it: docker --memory, or the pod's limit"
            yield Check("container memory", WARNING, f"limited to {_gib(limit)}", remedy)
    nodes = sorted(path.name.removeprefix("node") for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) > 1:
        remedy = "keep a process and its table near its GPU: numactl --cpunodebind=N --membind=N (nvidia-smi topo -m)"
        yield Check("NUMA nodes", WARNING, f"{len(nodes)}", remedy)
    elif nodes:
        yield Check("NUMA nodes", OK, "1")


def _container_limit() -> int | None:
    """Memory limit of the control group that this process sees as its root, in either version of cgroups."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        file = Path("/sys/fs/cgroup") / name
        if file.exists():
            text = file.read_text().strip()
            return int(text) if text.isdigit() else None
    return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
