"""What a matcher hands to a pass: candidates, and the reasons why some are none."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch.fx import Node

from ple_compile.report import GraphReport

Candidate = TypeVar("Candidate")


class Declined(Exception):
    """A candidate is not the op; the message is the reason that `explain` shows, `node` the place if one is known.

    `stage` tells how close it came: how many of the op's intermediate results it has too, or all but their rounding.
    """

    def __init__(self, reason: str, node: Node | None = None, stage: int = -1):
        super().__init__(reason)
        self.node = node
        self.stage = stage


def accepted(
    candidates: Iterable[tuple[Node, Candidate | Declined]],
    pass_name: str,
    report: GraphReport,
    verify: Callable[[Candidate], None] | None = None,
) -> Iterator[tuple[Node, Candidate]]:
    """The candidates that `verify` does not decline; the others go to `report` with their reasons."""
    for node, candidate in candidates:
        try:
            if isinstance(candidate, Declined):
                raise candidate
            if verify is not None:
                verify(candidate)
        except Declined as reason:
            report.declined(pass_name, reason.node or node, str(reason))
        else:
            yield node, candidate
