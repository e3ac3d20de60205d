"""Reports of compiled graphs, kept beside Inductor's cache.

On a compile-cache hit the passes do not run. What they did when the entry was made is read back from a small JSON
file, so that counters, `explain` and `stats` say the same as at the first compilation.
"""

import contextlib
import dataclasses
import hashlib
import logging
import pathlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ple_compile import upstream
from ple_compile.json_file import read_json, write_json
from ple_compile.merged_weights import storage_of
from ple_compile.pipeline import FusePass
from ple_compile.report import GraphReport

_collectors: list[list["Execution"]] = []
_regions: list[str] = []
_warned: set[str] = set()

log = logging.getLogger("ple_compile")


@dataclass(frozen=True)
class Record:
    """Where one graph's report lies. `nonce` is part of the key under which Inductor caches the graph.

    A graph without a readable record gets a new nonce, so a cache hit always has its report.
    """

    file: pathlib.Path
    nonce: str
    report: GraphReport | None


def find(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], salt: str) -> Record:
    """The record of a Dynamo graph, named by its nodes, its inputs' metadata, the grad mode and `salt`."""
    described = [str(gm.graph), salt, str(torch.is_grad_enabled()), str(torch.is_inference_mode_enabled())]
    storages: dict[int, int] = {}
    for x in example_inputs:
        is_tensor = isinstance(x, torch.Tensor)
        described.append(f"{x.dtype} {x.device} {x.shape} {x.stride()}" if is_tensor else str(type(x)))
        if isinstance(x, torch.nn.Parameter):  # whether it can share its storage with another decides what a pass does
            place = storages.setdefault(storage_of(x).cdata, len(storages))
            described.append(f"{place} {x.untyped_storage().nbytes()} {x.storage_offset()} {x.is_inference()}")
    name = hashlib.sha256("\n".join(described).encode()).hexdigest()
    file = pathlib.Path(upstream.cache_dir()) / "ple_compile" / f"{name}.json"
    try:
        data = read_json(file)
        return Record(file, data["nonce"], GraphReport.from_dict(data))
    except (OSError, ValueError, KeyError, TypeError):
        return Record(file, secrets.token_hex(8), None)


def resolve(record: Record, fuse: FusePass, from_cache: bool) -> GraphReport:
    """The report of a compilation: from the passes if they ran, else from the record that their last run left.

    Neither where Inductor has left our passes out, as its bisector does to find out whether they matter.
    """
    if fuse.ran:
        _keep(record, fuse.report)
        log.info("the passes rewrote: %s", _counted(fuse.report))
    if fuse.ran or not from_cache:
        return fuse.report
    report = record.report or fuse.report
    log.info(
        "compiled code came from PyTorch's cache, so no pass ran; those of its compilation rewrote: %s. "
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles anew",
        _counted(report),
    )
    return report


def _counted(report: GraphReport) -> str:
    return ", ".join(f"{name} {count}" for name, count in report.counts().items()) or "nothing"


def _keep(record: Record, report: GraphReport) -> None:
    """Write a record; without it the graph is compiled anew in the next process."""
    try:
        write_json(record.file, {"nonce": record.nonce, **report.to_dict()})
    except OSError as error:
        log.warning("the report of a compiled graph could not be kept in %s: %s", record.file.parent, error)


def publish(report: GraphReport) -> None:
    """Count a compiled graph's rewrites where PyTorch's own passes count theirs, and log what did not happen.

    Each pass that declined is a warning once, with the first place and reason; the others are INFO. Tables that were
    left on the host are logged where that is found out.
    """
    for name, count in report.counts().items():
        upstream.counters["ple_compile"][name] += count
    for event in (e for e in report.declines() if e.pass_name != "offload_tables"):
        first = event.pass_name not in _warned
        _warned.add(event.pass_name)
        more = "; ple_compile.explain(model, ...) lists every place" if first else ""
        where = outer_path(_regions[-1] if _regions else "", event.layer) or event.node
        log.log(
            logging.WARNING if first else logging.INFO,
            "%s declined at %s: %s%s",
            event.pass_name,
            where,
            event.reason,
            more,
        )


def outer_path(region: str, module: str) -> str:
    """A module path of a compiled graph, from the outside: below the region, which Dynamo calls by a local's name."""
    below = upstream.LOCAL.sub("", f"{module}.").rstrip(".") if region else module
    return ".".join(filter(None, (region, below)))


@contextlib.contextmanager
def region(name: str) -> Iterator[None]:
    """Names the module whose compiled code runs inside."""
    _regions.append(name)
    try:
        yield
    finally:
        _regions.pop()


@dataclass(frozen=True)
class Execution:
    """One call of a compiled graph. tensors: the identity of those that a module holds, by their names in it."""

    region: str
    report: GraphReport
    tensors: dict[str, int]


def executed(report: GraphReport, names: Sequence[str], args: Sequence[Any]) -> None:
    """Tell whoever collects that a compiled graph runs: in which region, on what, and at which sizes."""
    if not _collectors:
        return
    sizes = {symbol: int(args[found.argument]) for symbol, found in report.symbols.items()}
    held = {upstream.LOCAL.sub("", name): id(x) for name, x in zip(names, args) if upstream.LOCAL.match(name)}
    execution = Execution(_regions[-1] if _regions else "", dataclasses.replace(report, sizes=sizes), held)
    for collector in _collectors:
        collector.append(execution)


@contextlib.contextmanager
def collect() -> Iterator[list[Execution]]:
    """Collect every call of a compiled graph inside, in the order in which they run."""
    collector: list[Execution] = []
    _collectors.append(collector)
    try:
        yield collector
    finally:
        # By identity: two collectors that have seen the same graphs are equal.
        del _collectors[next(i for i, c in enumerate(_collectors) if c is collector)]
