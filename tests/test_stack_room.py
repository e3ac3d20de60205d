"""What is called with room on Python's stack maps no memory call by call, at whatever depth its caller is."""

import resource
from collections.abc import Callable

import pytest

from ple_compile import backend
from ple_compile.stack_room import with_room

CALLS = 2000


def many_calls() -> None:
    def nothing() -> None:
        pass

    for _ in range(CALLS):
        nothing()


def at_depth(depth: int, function: Callable[[], None]) -> None:
    if depth:
        at_depth(depth - 1, function)
    else:
        function()


def most_page_faults(function: Callable[[], None]) -> int:
    """Of all depths within two pieces of the stack; a frame of `at_depth` has some 15 words of 2,048."""
    most = 0
    for depth in range(300):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        at_depth(depth, function)
        most = max(most, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return most


def test_calls_map_no_memory() -> None:
    if most_page_faults(many_calls) < CALLS:
        pytest.skip("this Python maps no memory for calls")
    assert most_page_faults(with_room(many_calls)) < CALLS / 4


def test_a_function_stays_what_it_was() -> None:
    @with_room
    def add(a: int, b: int = 2) -> int:
        """Adds."""
        return a + b

    assert (add(1), add(1, b=3), add.__name__, add.__doc__) == (3, 4, "add", "Adds.")
    with pytest.raises(TypeError, match="unexpected keyword argument 'c'"):
        add(1, c=2)


def test_graphs_are_compiled_with_room() -> None:
    assert backend.compile_graph.__code__.co_stacksize > 2**16  # type: ignore[attr-defined]
