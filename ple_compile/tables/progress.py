"""How far a long copy is: a bar on a terminal's stderr, a line in the log at the start and at the end."""

import logging
import sys
import time

log = logging.getLogger(__name__)

_WIDTH = 30


class Progress:
    def __init__(self, label: str, total_bytes: int):
        self.label, self.total, self.done = label, max(total_bytes, 1), 0
        self._started, self._shown = time.perf_counter(), -1
        log.info("%s: %.2f GiB", label, total_bytes / 2**30)

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes
        filled = _WIDTH * self.done // self.total
        if filled != self._shown and sys.stderr.isatty():
            end = "\n" if self.done >= self.total else ""
            bar = "#" * filled + "." * (_WIDTH - filled)
            sys.stderr.write(f"\r{self.label} [{bar}] {self.done / 2**30:.1f} GiB{end}")
            sys.stderr.flush()
        self._shown = filled
        if self.done >= self.total:
            seconds = time.perf_counter() - self._started
            log.info("%s: %.1f s, %.2f GB/s", self.label, seconds, self.done / max(seconds, 1e-9) / 1e9)
