"""How far a long piece of work is: a bar on a terminal's stderr, and for copies a line in the log at start and end."""

import logging
import sys
import time

log = logging.getLogger(__name__)

_WIDTH = 30


class Progress:
    """Of a copy, in bytes."""

    def __init__(self, label: str, total_bytes: int):
        self.label, self.total, self.done = label, max(total_bytes, 1), 0
        self._started, self._shown = time.perf_counter(), -1
        log.info("%s: %.2f GiB", label, total_bytes / 2**30)

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes
        filled = _WIDTH * self.done // self.total
        if filled != self._shown:
            show(self.label, self.done, self.total, f"{self.done / 2**30:.1f} GiB")
        self._shown = filled
        if self.done >= self.total:
            seconds = time.perf_counter() - self._started
            log.info("%s: %.1f s, %.2f GB/s", self.label, seconds, self.done / max(seconds, 1e-9) / 1e9)


class Steps:
    """Of a number of steps, each with a name."""

    def __init__(self, label: str, total: int):
        self.label, self.total, self.done = label, max(total, 1), 0

    def begin(self, step: str) -> None:
        show(self.label, self.done, self.total, step)
        self.done += 1

    def end(self) -> None:
        show(self.label, self.total, self.total, "done")


def show(label: str, done: int, total: int, text: str) -> None:
    """Draw the bar over the one before, where somebody can see it."""
    if not sys.stderr.isatty():
        return
    filled = min(_WIDTH, _WIDTH * done // total)
    bar = "#" * filled + "." * (_WIDTH - filled)
    sys.stderr.write(f"\r{label} [{bar}] {text}\033[K" + ("\n" if done >= total else ""))
    sys.stderr.flush()
