"""prefetch_lookup on the device: what overlaps, what is returned, what memory it takes, under both ways of running."""

import gc
from contextlib import nullcontext

import pytest
import torch

import ple_compile
from ple_compile import offload_tables
from ple_compile.tables.find import find_tables
from tests.gpu import synchronisation
from tests.gpu.test_backend_gpu import released_layer
from tests.host_stack import Stack

MODES = ["default", "reduce-overhead"]
ROWS, WIDTH, HEADS = 400_000, 160, 16

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Rows(Stack):
    """Returns the rows that the lookup gave too."""

    def forward(self, hidden, tokens):
        rows = None
        for layer in self.layers:
            if layer.ngrams is not None:
                rows = layer.ngrams(tokens)
                hidden = hidden + layer.proj(rows)
            hidden = hidden + layer.down(torch.relu(layer.up(hidden)))
        return hidden, rows


class Slow(Stack):
    """Starts its lookup first, then sleeps on the GPU and allocates before the rows are used."""

    def forward(self, hidden, tokens):
        for layer in self.layers:
            hidden = hidden + layer.down(torch.relu(layer.up(hidden)))
        return torch.ops.ple_test.sleep(hidden), self.layers[2].ngrams(tokens)


@pytest.fixture(scope="module", autouse=True)
def sleep_op():
    with torch.library._scoped_library("ple_test", "FRAGMENT") as library:
        library.define("sleep(Tensor x) -> Tensor")

        def sleep(x):
            junk = [torch.full((1024, 2560), -7.0, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
            torch.cuda._sleep(100_000)
            del junk
            return x * 1

        library.impl("sleep", sleep, "CUDA")
        torch.library.register_fake("ple_test::sleep", torch.empty_like, lib=library)
        yield


def host_model(kind=Rows, hidden=1024, rows=ROWS):
    """The table's rows begin with their number."""
    model = kind(2, hidden=hidden, rows=HEADS, width=WIDTH, heads=HEADS).bfloat16()
    ngrams, weight = model.layers[2].ngrams, torch.ones(rows, WIDTH, dtype=torch.bfloat16)
    weight.view(torch.int64)[:, 0] = torch.arange(rows)
    ngrams.table = torch.nn.Embedding(rows, WIDTH, _weight=weight).requires_grad_(False)
    ngrams.sizes.fill_(rows // HEADS)
    ngrams.offsets.copy_(torch.arange(HEADS) * (rows // HEADS))
    offload_tables(model)
    return model.to("cuda")


def expected_rows(model, tokens, table_on_gpu):
    return table_on_gpu[model.layers[2].ngrams.ids(tokens)].flatten(-2)


def same_bytes(rows, expected):
    """Row numbers read as bfloat16 may be NaN."""
    return torch.equal(rows.view(torch.int16), expected.view(torch.int16))


def compiled(model, mode, **options):
    return torch.compile(model, backend="ple", fullgraph=True, options={"mode": mode, **options})


def device_events(call):
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def is_product(event):
    return any(part in event.name.lower() for part in ("gemm", "nvjet", "cutlass", "xmma"))


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_the_gather_runs_beside_the_products_of_the_previous_layer(mode):
    model = host_model(hidden=4096)
    step, args = compiled(model, mode), model.inputs(4096)
    for _ in range(4):
        step(*args)

    def behind_a_pause():
        torch.cuda._sleep(100_000_000)  # the host has launched everything before any of it starts
        step(*args)

    events = device_events(behind_a_pause)
    (gather,) = [e for e in events if e.name == "lookup_kernel"]
    products = sorted((e for e in events if is_product(e)), key=lambda e: e.time_range.start)
    assert len(products) >= 9, [e.name for e in events]
    beside = [
        e for e in products if e.time_range.start < gather.time_range.end and gather.time_range.start < e.time_range.end
    ]
    assert beside, [(e.name, e.time_range.start, e.time_range.end) for e in events]
    # Two products of layer 0 come first; those of layer 1 do not wait for the gather.
    assert sum(e.time_range.end <= gather.time_range.start for e in products) <= 3
    assert ple_compile.upstream.counters["ple_compile"]["prefetch_lookup"] == 1


@torch.no_grad()
def test_the_product_after_the_fork_leaves_room_for_the_gather():
    """It fills the device, so the gather must not come second. (A CUDA graph orders its branches itself.)"""
    model = host_model(hidden=4096)
    step, args = compiled(model, "default"), model.inputs(8192)
    for _ in range(4):
        step(*args)

    def behind_a_pause():
        torch.cuda._sleep(100_000_000)
        step(*args)

    events = device_events(behind_a_pause)
    (gather,) = [e for e in events if e.name == "lookup_kernel"]
    following = next(
        e
        for e in sorted(events, key=lambda e: e.time_range.start)
        if is_product(e) and e.time_range.end > gather.time_range.start
    )
    late = gather.time_range.start - following.time_range.start
    assert late < 0.1 * following.time_range.elapsed_us(), (late, following.time_range.elapsed_us())


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_a_thousand_steps_give_the_rows_asked_for(mode):
    model = host_model()
    table, lengths = model.layers[2].ngrams.table.weight.cuda(), (1, 64, 200)
    step = compiled(model, mode)
    reserved = []
    for number in range(1000):
        hidden, tokens = model.inputs(lengths[number % 3], seed=number)
        _, rows = step(hidden, tokens)
        assert same_bytes(rows, expected_rows(model, tokens, table)), number
        del rows
        if number in (300, 999):
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
    assert reserved[0] == reserved[1]


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_sleep_and_allocations_between_start_and_wait(mode):
    model = host_model(Slow)
    table, step = model.layers[2].ngrams.table.weight.cuda(), compiled(model, mode, prefetch_distance="earliest")
    for number in range(100):
        hidden, tokens = model.inputs(200, seed=number)
        _, rows = step(hidden, tokens)
        assert same_bytes(rows, expected_rows(model, tokens, table)), number


@torch.no_grad()
def test_two_batches_in_flight_on_two_streams():
    model = host_model()
    table, step = model.layers[2].ngrams.table.weight.cuda(), compiled(model, "default")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    step(*model.inputs(100))
    for number in range(100):
        results = []
        torch.cuda.synchronize()
        for seed, stream in enumerate(streams):
            hidden, tokens = model.inputs(100, seed=2 * number + seed)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                results.append((tokens, step(hidden, tokens)[1]))
        torch.cuda.synchronize()
        for tokens, rows in results:
            assert same_bytes(rows, expected_rows(model, tokens, table)), number


@torch.no_grad()
def test_captured_by_the_user():
    model = host_model()
    table, step = model.layers[2].ngrams.table.weight.cuda(), compiled(model, "default")
    hidden, tokens = model.inputs(100)
    for _ in range(3):
        step(hidden, tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, rows = step(hidden, tokens)
    for number in range(100):
        tokens.copy_(model.inputs(100, seed=number)[1])
        graph.replay()
        assert same_bytes(rows, expected_rows(model, tokens, table)), number


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_a_table_that_is_replaced_is_honoured_or_refused(mode):
    model = host_model()
    embedding, (hidden, tokens) = model.layers[2].ngrams.table, model.inputs(64)
    step = compiled(model, mode)

    def check():
        for _ in range(3):
            _, rows = step(hidden, tokens)
            assert same_bytes(rows, expected_rows(model, tokens, embedding.weight.cuda()))

    check()
    embedding.weight.add_(1)
    check()
    name = "layers.2.ngrams.table.weight"
    model.load_state_dict({name: torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)}, strict=False, assign=True)
    check()
    embedding.weight.data = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="offload_tables"):
        step(hidden, tokens)
    offload_tables(model)
    check()


@torch.no_grad()
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_compiling_needs_no_room_for_the_table(mode):
    """A table of 4 GiB and 2 GiB of device memory."""
    model = host_model(rows=4 * 2**30 // (2 * WIDTH) // HEADS * HEADS)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 2 * 2**30
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    torch.cuda.reset_peak_memory_stats()
    try:
        step = compiled(model, mode)
        for seed in range(4):
            hidden, tokens = model.inputs(64, seed)
            _, rows = step(hidden, tokens)
        assert torch.cuda.max_memory_reserved() <= limit
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    ids = model.layers[2].ngrams.ids(tokens).cpu()
    assert same_bytes(rows.cpu(), model.layers[2].ngrams.table.weight[ids].flatten(-2))


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("touched", ["offload_tables", "offload=True"])
def test_transformers_layer_with_its_table_on_the_cpu(mode, touched):
    layer = released_layer(torch.bfloat16)
    (table,) = find_tables(layer)
    table.weight.data = table.weight.data.cpu()
    options = {"mode": mode, "strict": True}
    if touched == "offload_tables":
        offload_tables(layer)
    else:
        options["offload"] = True
    step = torch.compile(layer.forward, backend="ple", fullgraph=True, options=options)
    for number in range(6):
        streams = torch.randn(1, 64, 10_240, device="cuda", dtype=torch.bfloat16)
        tokens = torch.randint(0, 32_000, (1, 64), device="cuda")
        with synchronisation.forbidden() if number == 5 else nullcontext():
            actual = step(streams, tokens, None)
        assert (actual != layer(streams, tokens, None)).float().mean() < 0.02, number
    assert ple_compile.upstream.counters["ple_compile"]["prefetch_lookup"] == 1
    assert ple_compile.stats()["ple_executions"] == 6


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [64, 600])  # the ids of 600 are put in order first
def test_no_host_synchronisation(mode, tokens):
    model = host_model()
    step, args = compiled(model, mode), model.inputs(tokens)
    for _ in range(4):
        step(*args)
    with synchronisation.forbidden():
        for _ in range(3):
            step(*args)


def milliseconds(call):
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


@torch.no_grad()
def test_a_wait_stalls_for_what_is_left_of_the_lookup():
    """All of it right behind the start, none of it behind products that take longer."""
    table = host_model().layers[2].ngrams.table.weight
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, ROWS, (16_384, HEADS), generator=generator).cuda()
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def step(num_products):
        flight = torch.ops.ple.lookup_start(table, ids)
        for _ in range(num_products):
            square @ square
        torch.ops.ple.lookup_wait(flight, table, ids)

    step(1)
    lookup = min(milliseconds(lambda: step(0)) for _ in range(3))
    product = min(milliseconds(lambda: square @ square) for _ in range(3))
    stalls = []
    for num_products in (0, 3 * int(lookup / product + 1)):
        torch.cuda.synchronize()
        ple_compile.reset_stats(stalls=True)
        for _ in range(5):
            step(num_products)
        found = ple_compile.stats()
        assert found["timed_waits"] == 5
        stalls.append(found["stall_us"] / 5000 / lookup)
    ple_compile.reset_stats()
    assert 0.7 < stalls[0] < 1.3 and stalls[1] < 0.1, (stalls, lookup, product)


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_stalls_that_a_cuda_graph_hides_are_not_counted_as_none(mode):
    model = host_model()
    step, args = compiled(model, mode), model.inputs(64)
    for _ in range(4):
        step(*args)
    ple_compile.reset_stats(stalls=True)
    with synchronisation.forbidden():
        for _ in range(3):
            step(*args)
    stats = ple_compile.stats()
    assert stats["prefetched_lookups"] == 3 and stats["timed_waits"] == (3 if mode == "default" else 0)
    assert (stats["stall_us"] > 0) == (mode == "default")


@torch.no_grad()
def test_stalls_asked_for_before_the_user_captures():
    model = host_model()
    table, step = model.layers[2].ngrams.table.weight.cuda(), compiled(model, "default")
    ple_compile.reset_stats(stalls=True)
    hidden, tokens = model.inputs(100)
    for _ in range(3):
        step(hidden, tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, rows = step(hidden, tokens)
    graph.replay()
    assert same_bytes(rows, expected_rows(model, tokens, table))
    stats = ple_compile.stats()
    assert (stats["timed_waits"], stats["prefetched_lookups"]) == (3, 4)


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_with_hot_rows(mode):
    model = host_model()
    offload_tables(model, gpu_cache_bytes=8_000_000)
    table, step = model.layers[2].ngrams.table.weight.cuda(), compiled(model, mode)
    for number in range(50):
        hidden, tokens = model.inputs(512, seed=number)
        _, rows = step(hidden, tokens)
        assert same_bytes(rows, expected_rows(model, tokens, table)), number
