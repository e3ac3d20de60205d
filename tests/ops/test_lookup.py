"""ple::lookup and its two-halves form; the kernel runs in Triton's interpreter."""

import pytest
import torch

from ple_compile.ops import _address_order, _host_reads, lookup, lookup_async
from ple_compile.ops.checked_ids import checked_ids

IMPLEMENTATIONS = [lookup.reference, lookup.launch]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.bool]


def make_table(rows, width, dtype=torch.bfloat16):
    """Random bytes: NaN payloads and negative zeros are to survive too."""
    words = torch.randint(0, 256, (rows, width * dtype.itemsize), dtype=torch.uint8)
    return words.remainder_(2).view(dtype) if dtype is torch.bool else words.view(dtype)


def assert_same_bytes(rows, expected):
    assert rows.dtype == expected.dtype and rows.shape == expected.shape and rows.is_contiguous()
    assert torch.equal(rows.view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 20, 160])
def test_equals_indexing(implementation, dtype, width):
    table, ids = make_table(97, width, dtype), torch.randint(0, 97, (2, 5, 3))
    assert_same_bytes(implementation(table, ids), table[ids])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (200,), (3, 0), (0,)])
def test_any_shape_of_ids(implementation, ids_dtype, shape):
    table, ids = make_table(50, 20), torch.randint(0, 50, shape, dtype=ids_dtype)
    assert_same_bytes(implementation(table, ids), table[ids.long()])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strided_ids_and_rows(implementation):
    table, ids = make_table(60, 33), torch.randint(0, 30, (7, 9, 2))
    assert_same_bytes(implementation(table, ids[..., 0].T), table[ids[..., 0].T])
    assert_same_bytes(implementation(table[::2, 1:30], ids), table[::2, 1:30][ids])
    assert_same_bytes(implementation(table[5:], ids), table[5:][ids])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_table_without_rows(implementation):
    assert implementation(make_table(0, 8), torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 2, 8)


def test_kernel_reads_only_the_table():
    """Rows before and after a slice must never appear, whatever the id."""
    whole = torch.full((30, 8), 7.0)
    table = whole[10:20]
    table.fill_(1.0)
    ids = torch.tensor([-1, 10, 0, 9, -(2**63), 2**63 - 1, 2**31, -(2**31) - 1])
    expected = torch.zeros(8, 8)
    expected[2:4] = 1.0
    assert torch.equal(lookup.launch(table, ids), expected)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_many_ids_are_read_by_address(ids_dtype, monkeypatch):
    monkeypatch.setattr(_host_reads, "ORDERED_FROM", 100)
    ordered = []
    address_order = _address_order.address_order
    monkeypatch.setattr(
        _address_order, "address_order", lambda *args: ordered.append(address_order(*args)) or ordered[-1]
    )
    table, ids = make_table(20_000, 20), torch.randint(0, 20_000, (25, 4), dtype=ids_dtype)
    assert_same_bytes(lookup.launch(table, ids), table[ids.long()])
    ids[0, 0], ids[3, 1], ids[24, 3] = -1, 20_000, torch.iinfo(ids_dtype).max
    outside = (ids < 0) | (ids >= 20_000)
    rows = lookup.launch(table, ids)
    assert_same_bytes(rows[~outside], table[ids[~outside].long()])
    assert rows[outside].view(torch.uint8).count_nonzero() == 0
    lookup.launch(table, ids[0])
    assert len(ordered) == 2, "a few ids are not worth a sort"


def test_ids_outside_are_reported():
    table, ids = make_table(10, 4), torch.tensor([[3, 10], [-1, 0]])
    with pytest.raises(ValueError, match="2 of 4 ids lie outside the table of 10 rows, 10 for one"):
        lookup.check_ids(table, ids)
    for function in (torch.ops.ple.lookup, torch.ops.ple.lookup_start, checked_ids):
        with pytest.raises(ValueError, match="outside the table"):
            function(table, ids)
    inside = ids.clamp(0, 9)
    lookup.check_ids(table, inside)
    assert torch.equal(checked_ids(table, inside), inside)
    torch.library.opcheck(checked_ids, (table, inside))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bad_inputs(implementation):
    with pytest.raises(ValueError, match="contiguous rows"):
        implementation(make_table(10, 4).T, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="ids are torch.float32"):
        implementation(make_table(10, 4), torch.zeros(1))


def test_offsets_are_64_bit():
    """Rows of 2 GiB apart, in a sparse mapping that touches three pages."""
    table = torch.empty(2**32 + 4096, dtype=torch.int8).as_strided((3, 8), (2**31, 1))
    for row in range(3):
        table[row] = row + 1
    assert torch.equal(lookup.launch(table, torch.tensor([2, 0, 1]))[:, 0], torch.tensor([3, 1, 2], dtype=torch.int8))


def test_start_then_wait_equals_lookup():
    table, ids = make_table(97, 20), torch.randint(0, 97, (4, 6))
    flight = torch.ops.ple.lookup_start(table, ids)
    assert_same_bytes(torch.ops.ple.lookup_wait(flight, table, ids), table[ids])
    # A flight is good for one wait; a second one fetches for itself and shares no memory with the first.
    again = torch.ops.ple.lookup_wait(flight, table, ids)
    assert_same_bytes(again, table[ids])


def test_two_flights_at_once_do_not_mix():
    table = make_table(97, 20)
    batches = [torch.randint(0, 97, (4, 6)) for _ in range(2)]
    flights = [torch.ops.ple.lookup_start(table, ids) for ids in batches]
    for flight, ids in reversed(list(zip(flights, batches))):
        assert_same_bytes(torch.ops.ple.lookup_wait(flight, table, ids), table[ids])


def test_the_start_does_the_work_on_the_cpu():
    table, ids = make_table(97, 20), torch.randint(0, 97, (4, 6))
    expected = table[ids]
    flight = torch.ops.ple.lookup_start(table, ids)
    table.zero_()
    assert_same_bytes(torch.ops.ple.lookup_wait(flight, table, ids), expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_fetches_once(dynamic, monkeypatch):
    """The flight's buffer survives the trip through compiled code: the wait does not fetch again."""
    fetched, reference = [], lookup.reference
    monkeypatch.setattr(lookup, "reference", lambda table, ids: fetched.append(len(ids)) or reference(table, ids))
    table = torch.nn.Parameter(torch.randn(97, 20), requires_grad=False)

    @torch.compile(fullgraph=True, dynamic=dynamic)
    def layer(ids, hidden):
        flight = torch.ops.ple.lookup_start(table, ids + 1)
        hidden = torch.sin(hidden @ hidden.T) @ hidden
        return torch.ops.ple.lookup_wait(flight, table, ids + 1) * 2 + hidden.sum()

    for tokens in (4, 7):
        ids, hidden = torch.randint(0, 96, (tokens,)), torch.randn(8, 8)
        expected = table[ids + 1] * 2 + (torch.sin(hidden @ hidden.T) @ hidden).sum()
        torch.testing.assert_close(layer(ids, hidden), expected)
    assert fetched == [4, 7]


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_operator_contracts(ids_dtype):
    table, ids = torch.randn(12, 4), torch.randint(0, 12, (2, 3), dtype=ids_dtype)
    torch.library.opcheck(torch.ops.ple.lookup.default, (table, ids))
    torch.library.opcheck(torch.ops.ple.lookup_start.default, (table, ids))
    flight = lookup_async.lookup_start(table, ids)
    torch.library.opcheck(torch.ops.ple.lookup_wait.default, (flight, table, ids))
