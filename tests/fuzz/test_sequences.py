"""A fixed part of what `python -m tests.fuzz` goes on with: random layers under random sequences of calls."""

import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.fuzz import packed, padded
from tests.fuzz.shared import run, script
from tests.ple_cases import Case

# The first example of a search is always the plainest; what is fixed here is the second.
fixed = settings(
    max_examples=2, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@fixed
@given(padded.models, st.lists(padded.actions, min_size=2, max_size=5))
def test_padded_sequences(case: Case, sequence: list) -> None:
    sequence = [padded.Padded.first, *sequence, padded.Call(2, 1)]
    note(script(padded.Padded, case, sequence))
    run(padded.Padded, case, sequence)


def test_packed_sequences() -> None:
    """One layer, compiled once."""
    case = packed.PackedCase(accepted=True, boundaries=True, index_dtype=torch.int32, pool="view", rows=5, kernel=3)
    server = run(packed.Packed, case, [packed.Packed.first])

    @fixed
    @given(st.lists(st.one_of(packed.steps, packed.steps, packed.frees), min_size=20, max_size=20))
    def goes_on(sequence: list) -> None:
        for action in sequence:
            server.apply(action)

    goes_on()
    assert server.calls >= 30
