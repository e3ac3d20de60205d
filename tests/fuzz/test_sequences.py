"""A fixed part of what `python -m tests.fuzz` goes on with: random layers under random sequences of calls."""

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.fuzz.sequences import Action, Call, actions, cases, run, script
from tests.ple_cases import Case


@settings(max_examples=2, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(cases, st.lists(actions, min_size=2, max_size=5))
def test_random_sequences(case: Case, sequence: list[Action]) -> None:
    sequence = [Call(3, 0), *sequence, Call(2, 1)]
    note(script(case, sequence))
    run(case, sequence)
