"""Host tables on the device: page-locked where they lie, read by a bounded grid beside other work, always exact."""

import gc

import pytest
import torch
from torch import nn

from ple_compile.ops import lookup, lookup_async
from ple_compile.tables import hot_rows, pinning
from ple_compile.tables.offload import offload_tables
from tests.gpu import synchronisation

ROWS, WIDTH = 200_000, 160


class NGrams(nn.Module):
    def __init__(self, rows=ROWS, width=WIDTH, dtype=torch.bfloat16, device=None):
        super().__init__()
        self.register_buffer("multipliers", torch.arange(3))
        self.register_buffer("sizes", torch.full((16,), rows // 16))
        self.register_buffer("offsets", torch.arange(16) * (rows // 16))
        self.table = nn.Embedding(rows, width, dtype=dtype, device=device).requires_grad_(False)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    module = NGrams()
    offload_tables(module)
    return module


def draw_ids(*shape, rows=ROWS):
    return torch.randint(0, rows, shape, device="cuda")


def assert_rows(rows, table, ids):
    assert rows.is_cuda and torch.equal(rows.cpu(), table.detach()[ids.cpu().long()])


def test_moving_the_model_leaves_the_table_and_uses_no_device_memory(model):
    torch.cuda.synchronize()
    before, address = torch.cuda.memory_allocated(), model.table.weight.data_ptr()
    model.to("cuda")
    assert model.table.weight.device.type == "cpu" and model.table.weight.data_ptr() == address
    assert model.sizes.is_cuda and torch.cuda.memory_allocated() - before < 2**20


def test_cuda_view_aliases_the_host_memory():
    host = torch.randn(1000, 8).bfloat16()
    pinning.page_lock(host)
    view = pinning.cuda_view(host)
    assert view.is_cuda and view.dtype == host.dtype and torch.equal(view.cpu(), host)
    host[5] = 1.0
    assert view[5].eq(1.0).all()
    view[6] = 2.0
    torch.cuda.synchronize()
    assert host[6].eq(2.0).all()
    del host
    gc.collect()
    assert torch.isfinite(view.float().sum())


def test_memory_can_be_locked_again_after_its_tensor_died():
    for _ in range(20):
        host = torch.empty(2**26, dtype=torch.uint8)
        pinning.page_lock(host)
        assert host.is_pinned()
        del host


def test_a_table_is_one_memory_for_kernels_and_copies():
    """5 GiB, in one registration: a copy that spans two is an invalid argument."""
    table = torch.zeros(5 * 2**30 // 320, 320, dtype=torch.uint8)
    pinning.page_lock(table)
    table[-1], table[2**32 // 320] = 3, 5
    ids = torch.tensor([0, 2**32 // 320, len(table) - 1], device="cuda")
    assert_rows(torch.ops.ple.lookup(table, ids), table, ids)
    on_device = table.to("cuda")
    assert on_device[ids].eq(torch.tensor([[0], [5], [3]], device="cuda")).all()
    table.copy_(on_device + 1)
    assert_rows(torch.ops.ple.lookup(table, ids), table, ids)
    assert table[-1].eq(4).all()


def test_views_of_parts_and_of_memory_that_torch_pinned():
    """They count as host memory, so a bounded grid reads them."""
    host = torch.randint(0, 255, (1000, 8), dtype=torch.uint8)
    pinning.page_lock(host)
    for table in (host[100:], host.clone().pin_memory(), host.clone().pin_memory()[100:]):
        view = pinning.cuda_view(table)
        assert pinning.is_host_memory(view) and not pinning.is_host_memory(table.cuda())
        assert torch.equal(view.cpu(), table)


def test_a_refused_registration_leaves_no_error_behind():
    host = torch.empty(2**20, dtype=torch.uint8)
    assert torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0).value == 0
    try:
        # Registered behind our back through an unaligned part: the driver refuses to register the same pages again.
        assert pinning._host_register(host.data_ptr(), host.nbytes) != 0
        pinning._clear_cuda_error()
        assert torch.ones(4, device="cuda").sum() == 4
    finally:
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("width", [1, 3, 160])
@pytest.mark.parametrize("on_host", [False, True])
def test_lookup_equals_indexing(dtype, width, on_host):
    table = torch.randint(0, 256, (977, width * dtype.itemsize), dtype=torch.uint8).view(dtype)
    if on_host:
        pinning.page_lock(table)
    placed = table if on_host else table.cuda()
    for ids in (draw_ids(3, 5, rows=977), draw_ids(8192, rows=977).int(), draw_ids(64, 2, rows=977)[:, 0]):
        rows = torch.ops.ple.lookup(placed, ids)
        expected = table[ids.cpu().long()]
        assert rows.is_contiguous() and torch.equal(rows.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_ids_outside_read_nothing(model):
    ids = torch.tensor([-1, ROWS, 0, ROWS - 1, -(2**63), 2**63 - 1], device="cuda")
    rows = torch.ops.ple.lookup(model.table.weight, ids).cpu()
    assert torch.equal(rows[2:4], model.table.weight[[0, ROWS - 1]]) and not rows[[0, 1, 4, 5]].any()
    with pytest.raises(ValueError, match="4 of 6 ids"):
        lookup.check_ids(model.table.weight, ids)


def test_pageable_memory_is_refused(model):
    with pytest.raises(ValueError, match="pageable"):
        torch.ops.ple.lookup(torch.randn(10, 4), draw_ids(3, rows=10))
    with pytest.raises(ValueError, match="pageable"):
        torch.ops.ple.lookup_start(torch.randn(10, 4), draw_ids(3, rows=10))
    with pytest.raises(ValueError, match="move the ids"):
        torch.ops.ple.lookup(torch.randn(10, 4, device="cuda"), torch.zeros(3, dtype=torch.int64))


def test_swapped_table_is_honoured_once_locked_and_refused_before():
    module, ids = NGrams(rows=1600), draw_ids(50, rows=1600)
    offload_tables(module)
    assert_rows(torch.ops.ple.lookup(module.table.weight, ids), module.table.weight, ids)
    module.table.weight.data = torch.randn_like(module.table.weight)
    with pytest.raises(ValueError, match="offload_tables"):
        torch.ops.ple.lookup(module.table.weight, ids)
    offload_tables(module)
    assert_rows(torch.ops.ple.lookup(module.table.weight, ids), module.table.weight, ids)
    module.load_state_dict(NGrams(rows=1600).state_dict(), assign=True)
    assert_rows(torch.ops.ple.lookup(module.table.weight, ids), module.table.weight, ids)


def test_a_thousand_steps_with_work_and_allocations_between(model):
    table = model.table.weight
    host = table.detach().cuda()
    memory = []
    for step in range(1000):
        ids = draw_ids(1 + step * 7 % 400, 16)
        flight = torch.ops.ple.lookup_start(table, ids)
        if step % 3 == 0:
            torch.cuda._sleep(20_000)
        # Allocation pressure: whatever the start let go of would be overwritten here.
        junk = [torch.full((ids.numel() * WIDTH,), -7.0, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        del junk
        rows = torch.ops.ple.lookup_wait(flight, table, ids)
        assert torch.equal(rows, host[ids]), step
        del rows, flight
        if step in (500, 999):
            torch.cuda.synchronize()
            memory.append(torch.cuda.memory_reserved())
    assert memory[0] == memory[1]


def test_two_interleaved_batches_and_dropped_flights(model):
    table = model.table.weight
    host = table.detach().cuda()
    for step in range(200):
        batches = [draw_ids(300, 16), draw_ids(17, 16)]
        flights = [torch.ops.ple.lookup_start(table, ids) for ids in batches]
        torch.ops.ple.lookup_start(table, batches[0])  # never waited for
        order = (0, 1) if step % 2 else (1, 0)
        for which in order:
            rows = torch.ops.ple.lookup_wait(flights[which], table, batches[which])
            assert torch.equal(rows, host[batches[which]])


def test_on_two_streams(model):
    table = model.table.weight
    host = table.detach().cuda()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(50):
        results = []
        for stream in streams:
            with torch.cuda.stream(stream):
                ids = draw_ids(500, 16)
                flight = torch.ops.ple.lookup_start(table, ids)
                torch.cuda._sleep(10_000)
                results.append((torch.ops.ple.lookup_wait(flight, table, ids), ids))
        torch.cuda.synchronize()
        assert all(torch.equal(rows, host[ids]) for rows, ids in results)


def test_captured_in_a_cuda_graph(model):
    table = model.table.weight
    host, ids = table.detach().cuda(), draw_ids(256, 16)
    weight = torch.randn(1024, 1024, device="cuda")

    def step():
        flight = torch.ops.ple.lookup_start(table, ids)
        hidden = weight @ weight
        return torch.ops.ple.lookup_wait(flight, table, ids), hidden

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, _ = step()
        second, _ = step()
    for _ in range(100):
        ids.copy_(draw_ids(256, 16))
        graph.replay()
        assert torch.equal(first, host[ids]) and torch.equal(second, host[ids])


def test_the_start_overlaps_with_work_on_the_main_stream(model):
    """In the profiler's trace the gather begins before, and ends after, kernels launched behind it."""
    table, ids = model.table.weight, draw_ids(8192, 16)
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)

    def step():
        flight = torch.ops.ple.lookup_start(table, ids)
        for _ in range(20):
            a @ a
        return torch.ops.ple.lookup_wait(flight, table, ids) * 1

    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    (gather,) = [e for e in events if e.name == "lookup_kernel"]
    inside = [
        e.time_range.elapsed_us()
        for e in events
        if e is not gather
        and gather.time_range.start <= e.time_range.start
        and e.time_range.end <= gather.time_range.end
    ]
    assert len(inside) >= 3 and sum(inside) >= 0.5 * gather.time_range.elapsed_us()


def test_no_host_synchronisation(model):
    table, ids = model.table.weight, draw_ids(64, 16)
    lookup_async.lookup_wait(lookup_async.lookup_start(table, ids), table, ids)
    with synchronisation.forbidden():
        flight = torch.ops.ple.lookup_start(table, ids)
        torch.ops.ple.lookup_wait(flight, table, ids)
        torch.ops.ple.lookup(table, ids)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled(model, mode):
    """With the table's CUDA view in the graph, marked as a static address, as the backend does it."""
    host, table = model.table.weight.detach().cuda(), pinning.cuda_view(model.table.weight.detach())
    torch._dynamo.mark_static_address(table)
    torch._dynamo.reset()

    @torch.compile(mode=mode, fullgraph=True)
    def layer(ids, hidden):
        flight = torch.ops.ple.lookup_start(table, ids)
        hidden = torch.relu(hidden @ hidden)
        return torch.ops.ple.lookup_wait(flight, table, ids) * 2, hidden

    for tokens in (64, 64, 64, 64):
        ids, hidden = draw_ids(tokens, 16), torch.randn(256, 256, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        rows, _ = layer(ids, hidden)
        assert torch.equal(rows, host[ids] * 2)


def test_a_wait_on_another_stream_hands_over_memory_of_that_stream(model):
    """Inductor splits a graph with the host tensor itself before the start, so the wait runs under another pool."""
    table, ids = model.table.weight, draw_ids(64, 16)
    flight = torch.ops.ple.lookup_start(table, ids)
    started = flight.__dict__["transfer"].rows
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        rows = torch.ops.ple.lookup_wait(flight, table, ids)
    other.synchronize()
    assert rows.data_ptr() != started.data_ptr()
    assert_rows(rows, table, ids)


def test_a_start_outside_a_captured_graph_is_refused(model):
    table, ids = model.table.weight, draw_ids(64, 16)
    flight = torch.ops.ple.lookup_start(table, ids)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="started outside the CUDA graph"), torch.cuda.graph(graph):
        torch.ops.ple.lookup_wait(flight, table, ids)
    torch.cuda.synchronize()
    assert_rows(torch.ops.ple.lookup(table, ids), table, ids)


def zipf_ids(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(tokens, 16, generator=generator, dtype=torch.float64)
    return ((uniform**-3).long() * 2654435761 % ROWS).cuda()


def hot_model(cache_bytes):
    module = NGrams().cuda()
    offload_tables(module, gpu_cache_bytes=cache_bytes)
    return module, hot_rows.cache_of(module.table.weight, torch.device("cuda", 0))


@pytest.mark.parametrize("cache_bytes", [100_000, 4_000_000])
def test_hot_rows_are_exact_and_fetched_once(cache_bytes):
    module, cache = hot_model(cache_bytes)
    host = module.table.weight.detach().cuda()
    for step in range(100):
        ids = zipf_ids(256 + step, step)
        cache.reset_counts()
        held = cache.holds(ids)
        flight = torch.ops.ple.lookup_start(module.table.weight, ids)
        assert torch.equal(torch.ops.ple.lookup_wait(flight, module.table.weight, ids), host[ids])
        counts = cache.counts()
        # A row that this batch evicts before all its positions have looked is fetched after all, but once.
        assert counts["looked_up"] == ids.numel() and 0 <= counts["hits"] <= held.sum()
        assert ids[~held].unique().numel() <= counts["fetched"] <= ids.unique().numel()
    assert held.float().mean() > 0.3 and cache._state[0] == 0


def test_hot_rows_under_two_streams_and_graphs_at_once():
    module, cache = hot_model(1_000_000)
    table = module.table.weight
    host = table.detach().cuda()
    torch.ops.ple.lookup(table, zipf_ids(512, 0))
    streams, graphs, inputs, outputs = [], [], [], []
    for seed in range(3):
        ids = zipf_ids(512, seed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flight = torch.ops.ple.lookup_start(table, ids)
            rows = torch.ops.ple.lookup_wait(flight, table, ids)
        streams.append(torch.cuda.Stream())
        graphs.append(graph)
        inputs.append(ids)
        outputs.append(rows)
    for step in range(200):
        for seed, ids in enumerate(inputs):
            ids.copy_(zipf_ids(512, 3 * step + seed))
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(rows, host[ids]) for rows, ids in zip(outputs, inputs)), step
    assert cache._state[0] == 0


def test_hot_rows_follow_an_update_and_need_no_host_synchronisation():
    module, cache = hot_model(1_000_000)
    table, ids = module.table.weight, zipf_ids(512, 0)
    torch.ops.ple.lookup(table, ids)
    with synchronisation.forbidden():
        torch.ops.ple.lookup_wait(torch.ops.ple.lookup_start(table, ids), table, ids)
    assert cache.holds(ids).any()
    module.load_state_dict(NGrams().state_dict())
    assert_rows(torch.ops.ple.lookup(table, ids), table, ids)
    with torch.no_grad():
        table.mul_(2)
    assert_rows(torch.ops.ple.lookup(table, ids), table, ids)


def test_hot_rows_use_the_memory_they_were_given():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    module, cache = hot_model(50_000_000)
    used = torch.cuda.memory_allocated() - before
    assert 49_000_000 < used < 51_000_000
    del module, cache
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 1_000_000
