"""Lookups in host tables, started a layer ahead: what the graph becomes, and what runs.

The table counts as page-locked and its view is the table itself, so the pass runs as on a GPU, on the CPU halves of the
op. The order is asserted in the code that Inductor generates.
"""

import re

import pytest
import torch
import transformers
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import ple_compile
from examples.reference.config import tiny
from examples.reference.model import TextModel
from ple_compile import Config, host_tables, offload_tables, reset_stats, stats, whole_graph
from ple_compile.ops.lookup import lookup
from ple_compile.ops.lookup_async import lookup_start, lookup_wait
from ple_compile.passes.prefetch_lookup import prefetch_lookup
from ple_compile.report import GraphReport
from ple_compile.tables import hot_rows, pinning
from tests.fake_driver import driver, views  # noqa: F401
from tests.graphs import Traced, assert_expected, passes_backend
from tests.host_stack import Stack
from tests.whole_graph.tiny_qwen4exp import make_model

RELEASE = (torch.__version__.split("+")[0].rsplit(".", 1)[0], transformers.__version__.rsplit(".", 1)[0])
recorded = pytest.mark.skipif(
    RELEASE != ("2.13", "5.24"), reason="version: graphs are recorded with torch 2.13, transformers 5.24"
)

pytestmark = pytest.mark.usefixtures("views", "fresh_dynamo")


def order_of_calls(code):
    """Products and lookups in the order in which generated code calls them."""
    found = re.findall(r"extern_kernels\.(addmm|mm)\(|torch\.ops\.ple\.lookup_(start|wait)\.default\(", code)
    return " ".join({"addmm": "mm"}.get(product, product) or half for product, half in found)


def run(module, length=20, **options):
    """The order of calls in the one graph that `module` becomes; its result is eager's."""
    torch._dynamo.reset()
    args = module.inputs(length)
    compiled = torch.compile(module, backend="ple", fullgraph=True, options=options)
    with torch.no_grad():
        actual, (code,) = run_and_get_code(compiled, *args)
        torch.testing.assert_close(actual, module(*args), rtol=1e-5, atol=1e-5)
    return order_of_calls(code)


def offloaded(*with_tables, **settings):
    model = Stack(*with_tables, **settings)
    offload_tables(model)
    return model


@pytest.mark.parametrize(
    ("distance", "expected"),
    [
        (1, "mm mm mm mm start mm mm wait mm mm mm"),
        (2, "mm mm start mm mm mm mm wait mm mm mm"),
        (3, "start mm mm mm mm mm mm wait mm mm mm"),
        (9, "start mm mm mm mm mm mm wait mm mm mm"),
        ("earliest", "start mm mm mm mm mm mm wait mm mm mm"),
    ],
)
def test_distance(distance, expected):
    assert run(offloaded(3), prefetch_distance=distance) == expected


def test_rows_and_their_bytes_are_counted_call_by_call():
    """Also where the length is symbolic, with both halves of a lookup in the graph; the CPU never stalls."""
    model = offloaded(1, 3)
    reset_stats(stalls=True)
    compiled = torch.compile(model, backend="ple", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (20, 33):
            compiled(*model.inputs(length))
    rows = 2 * 4 * (20 + 33)
    assert stats() == {
        "ple_executions": 0,
        "rows_looked_up": rows,
        "host_table_bytes": rows * 24 * 4,
        "bytes_from_other_ranks": 0,
        "prefetched_lookups": 4,
        "hot_row_hits": 0,
        "timed_waits": 4,
        "stall_us": 0,
    }
    reset_stats()
    assert "stall_us" not in stats()


def test_a_table_in_the_first_layer_starts_first_and_is_waited_for_at_its_use():
    assert run(offloaded(0, num_layers=2)) == "start wait mm mm mm mm mm"


def test_two_tables_in_one_graph():
    calls = run(offloaded(1, 2))
    assert calls == "start mm mm start wait mm mm mm wait mm mm mm mm mm"


def test_without_the_pass_the_lookup_stays_one_call():
    assert run(offloaded(2), prefetch_lookup=False) == "mm mm mm mm mm mm mm mm mm"


@pytest.mark.parametrize("reordering", ["topological_sort_bfs", "topological_sort_dfs"])
def test_the_scheduler_keeps_them_apart_however_it_reorders(reordering, monkeypatch):
    """Whichever order Inductor finds best for peak memory; left to dependences alone, start and wait are neighbours."""
    from torch._inductor import memory

    original, order = memory.reorder_for_peak_memory, []

    def reorder(*args):
        def method(nodes):
            order[:] = getattr(memory, reordering)(nodes)
            return order

        original(*args, methods=[method])
        return order

    monkeypatch.setattr(memory, "reorder_for_peak_memory", reorder)
    with fresh_cache():
        before, after = run(offloaded(3)).split(" wait ")
    assert before.count("mm") == 6 and after == "mm mm mm"
    assert before.split("start")[1].count("mm") >= 2


@pytest.mark.parametrize("locality", [False, True])
def test_with_and_without_the_reordering_for_locality(locality):
    calls = run(offloaded(3), inductor={"reorder_for_locality": locality})
    assert calls == "mm mm mm mm start mm mm wait mm mm mm"


def test_gradients_of_the_other_weights():
    """In training Inductor does not move the lookup to its use; the pass does."""
    model = offloaded(3)
    model.layers[0].requires_grad_(True)
    compiled = torch.compile(model, backend="ple", fullgraph=True)
    hidden, tokens = model.inputs()
    _, codes = run_and_get_code(lambda: compiled(hidden, tokens).square().sum().backward())
    gradients = [p.grad.clone() for p in model.layers[0].parameters()]
    model.zero_grad()
    model(hidden, tokens).square().sum().backward()
    for actual, expected in zip(gradients, (p.grad for p in model.layers[0].parameters())):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert order_of_calls(codes[0]) == "mm mm mm mm start mm mm wait mm mm mm"


def test_dynamic_lengths_fetch_once_per_call(monkeypatch):
    from ple_compile.ops import lookup as lookup_op

    fetched, reference = [], lookup_op.reference
    monkeypatch.setattr(lookup_op, "reference", lambda table, ids: fetched.append(ids.numel()) or reference(table, ids))
    model = offloaded(2)
    compiled = torch.compile(model, backend="ple", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (20, 7, 33):
            hidden, tokens = model.inputs(length, seed=length)
            torch.testing.assert_close(compiled(hidden, tokens), model(hidden, tokens), rtol=1e-5, atol=1e-5)
    assert fetched == [80, 28, 132]
    assert torch._dynamo.utils.counters["ple_compile"]["prefetch_lookup"] == 1


def test_ids_that_someone_else_reads():
    class Reader(Stack):
        def forward(self, hidden, tokens):
            return super().forward(hidden, tokens), self.layers[2].ngrams.ids(tokens)

    model = Reader(2)
    offload_tables(model)
    assert run(model) == "mm mm start mm mm wait mm mm mm mm mm"


def test_what_the_forward_writes_in_place_stays():
    """The graph in which the table is taken over is not functional yet."""

    class Writer(Stack):
        def forward(self, hidden, tokens):
            state = torch.zeros_like(hidden)
            state.fill_(3.0)
            return super().forward(hidden + state, tokens)

    model = Writer(2)
    offload_tables(model)
    assert run(model) == "mm mm start mm mm wait mm mm mm mm mm"


def test_a_node_that_cuda_graphs_cannot_hold_comes_before_the_start():
    """Inductor cuts its graph there, and start and wait belong into one part."""

    @torch.library.custom_op("ple_test::not_captured", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
    def not_captured(x: torch.Tensor) -> torch.Tensor:
        return x * 1.5

    not_captured.register_fake(torch.empty_like)

    class Split(Stack):
        def forward(self, hidden, tokens):
            for i, layer in enumerate(self.layers):
                hidden = layer(hidden, tokens)
                if i == 1:
                    hidden = not_captured(hidden)
            return hidden

    model = Split(3)
    offload_tables(model)
    settings = dict(prefetch_distance="earliest")
    assert run(model, **settings) == "start mm mm mm mm mm mm wait mm mm mm"
    assert run(model, **settings, mode="reduce-overhead") == "mm mm mm mm start mm mm wait mm mm mm"


def test_an_untouched_table_is_left_alone_with_one_warning(driver, caplog, monkeypatch):  # noqa: F811
    monkeypatch.setattr(host_tables, "_warned", set())
    model = Stack(2)
    assert run(model) == "mm mm mm mm mm mm mm mm mm"
    assert run(model, length=7) == "mm mm mm mm mm mm mm mm mm"
    (warning,) = [record.getMessage() for record in caplog.records if "pageable" in record.getMessage()]
    assert "ple_compile.offload_tables(model)" in warning and "offload=True" in warning
    assert "the table layers.2.ngrams.table.weight (" in warning
    assert not driver.locked


@torch.no_grad()
def test_a_table_that_is_left_on_the_host_is_reported_and_raised(driver, no_codegen):  # noqa: F811
    """Whatever the reason; with graphs that PyTorch's cache may hold from when the table was not left."""
    model, taken = Stack(2), Stack(2)
    offload_tables(taken)
    compiled = {name: torch.compile(m, backend="ple") for name, m in (("left", model), ("taken", taken))}
    reports = {name: ple_compile.explain(call, *model.inputs()) for name, call in compiled.items()}
    reasons = [e.reason for _, e in reports["left"].events() if e.pass_name == "offload_tables"]
    assert len(reasons) == 1 and "layers.2.ngrams.table.weight" in reasons[0] and "pageable" in reasons[0]
    assert reasons[0] in str(reports["left"]) and "offload_tables" not in str(reports["taken"])
    strict = torch.compile(model, backend="ple", options={"strict": True})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="pageable host memory"):
        strict(*model.inputs())


def test_offload_in_the_configuration_page_locks_what_it_meets(driver, views):  # noqa: F811
    model = Stack(2)
    assert run(model, offload=True) == "mm mm start mm mm wait mm mm mm mm mm"
    weight = model.layers[2].ngrams.table.weight
    assert driver.covers(weight) and set(views) == {weight.data_ptr()}


def test_offload_in_the_configuration_page_locks_what_the_same_code_meets_later(driver, no_codegen):  # noqa: F811
    """A second model runs the code that was compiled for the first; and a table may be replaced."""
    models = [Stack(2), Stack(2)]
    models[1].layers[2].ngrams.table.weight.mul_(2)
    for model in models:
        compiled = torch.compile(model, backend="ple", fullgraph=True, options={"offload": True})
        for _ in range(2):
            weight = model.layers[2].ngrams.table.weight
            weight.data = weight.data + 1
            with torch.no_grad():
                torch.testing.assert_close(compiled(*model.inputs()), model(*model.inputs()), rtol=1e-5, atol=1e-5)
            assert driver.covers(weight)


def test_a_page_lock_that_is_refused_while_compiling(driver):  # noqa: F811
    """The first of two tables is released again, the model runs in eager PyTorch, and the next call compiles it."""
    model = Stack(1, 3)
    driver.refuse_after = model.layers[1].ngrams.table.weight.nbytes
    compiled = torch.compile(model, backend="ple", fullgraph=True, options={"offload": True})
    with torch.no_grad():
        expected = model(*model.inputs())
        with pytest.raises(Exception, match="page-locking .* was refused by the CUDA driver"):
            compiled(*model.inputs())
        assert not driver.locked
        torch.testing.assert_close(model(*model.inputs()), expected)
        driver.refuse_after = None
        torch.testing.assert_close(compiled(*model.inputs()), expected)
    assert len(driver.locked) == 2


def test_reports_of_a_page_locked_and_of_an_untouched_table_are_kept_apart():
    """The same model gives two graphs; a compile-cache hit finds the right report."""
    counts = []
    for locked in (True, False, True):
        model = offloaded(2) if locked else Stack(2)
        torch._dynamo.utils.counters.clear()
        run(model)
        counts.append(torch._dynamo.utils.counters["ple_compile"]["prefetch_lookup"])
    assert counts == [1, 0, 1]


def test_a_table_that_is_replaced_is_honoured_or_refused():
    model = offloaded(2)
    compiled = torch.compile(model, backend="ple", fullgraph=True)
    table, (hidden, tokens) = model.layers[2].ngrams.table, model.inputs()
    with torch.no_grad():
        compiled(hidden, tokens)
        table.weight.mul_(2)
        torch.testing.assert_close(compiled(hidden, tokens), model(hidden, tokens), rtol=1e-5, atol=1e-5)
        model.load_state_dict({name: t + 1 for name, t in model.state_dict().items() if "table" in name}, False, True)
        torch.testing.assert_close(compiled(hidden, tokens), model(hidden, tokens), rtol=1e-5, atol=1e-5)
        table.weight.data = torch.randn(1000, 24)
        with pytest.raises(ValueError, match="offload_tables"):
            compiled(hidden, tokens)
        offload_tables(model)
        torch.testing.assert_close(compiled(hidden, tokens), model(hidden, tokens), rtol=1e-5, atol=1e-5)


def test_hot_rows_of_an_earlier_table_go_before_compiled_code_runs():
    """Inductor's CUDA graphs replay the lookup without asking the cache whether it is current."""
    model = Stack(2)
    offload_tables(model, gpu_cache_bytes=2**16)
    table, ids, calls = model.layers[2].ngrams.table.weight, torch.arange(1000), []
    cache = hot_rows.cache_of(table, torch.device("cpu"))

    def backend(gm, example_inputs):
        found, _ = host_tables.take_over(gm, list(example_inputs), Config())

        def replay(*args):
            host_tables.views(found, args)
            calls.append(int(cache.holds(ids).sum()))
            return [args[0]]

        return replay

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        cache.prepared(torch.empty(1000, 24), table, ids).fetch()
        compiled(*model.inputs())
        table.add_(1)
        compiled(*model.inputs())
    assert calls[0] > 0 and calls[1] == 0


def test_compiled_code_does_not_keep_a_table_alive(driver):  # noqa: F811
    import gc

    model = offloaded(2)
    compiled = torch.compile(model, backend="ple", fullgraph=True)
    with torch.no_grad():
        compiled(*model.inputs())
    assert driver.locked
    model.layers[2].ngrams.table.weight.data = torch.empty(0)
    gc.collect()
    assert not driver.locked


def trace(function, *args):
    """The ATen graph of a function as it is written, mutations in their places."""
    return make_fx(function, tracing_mode="fake")(*args).graph


def test_left_alone_when_the_ids_read_what_was_written_before_them():
    def function(table, context, hidden, tokens):
        hidden = hidden @ hidden
        context[:3].copy_(tokens[:3])
        return lookup(table, context + 1), hidden @ hidden

    table, tokens = torch.randn(50, 4), torch.arange(6)
    graph, report = trace(function, table, tokens, torch.randn(3, 3), tokens), GraphReport()
    assert prefetch_lookup(graph, report, prefetch_distance=1) == 0
    (decline,) = report.declines()
    assert "writes to what the ids are computed from" in decline.reason


def test_a_write_after_the_lookup_is_no_obstacle():
    def function(table, context, hidden, tokens):
        hidden = hidden @ hidden
        rows = lookup(table, context + 1)
        context.copy_(tokens)
        return rows * 2, hidden

    table, tokens = torch.randn(50, 4), torch.arange(6)
    graph = trace(function, table, tokens, torch.randn(3, 3), tokens)
    assert prefetch_lookup(graph, GraphReport(), prefetch_distance=1) == 1
    graph.lint()
    (start,) = graph.find_nodes(op="call_function", target=lookup_start)
    (write,) = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert start < write


def test_rows_that_nothing_needs_any_more():
    """An earlier pass leaves what it has replaced in the graph."""

    def function(table, hidden, ids):
        lookup(table, ids) * 2
        return hidden @ hidden

    graph = trace(function, torch.randn(50, 4), torch.randn(3, 3), torch.arange(6))
    assert prefetch_lookup(graph, GraphReport(), prefetch_distance=1) == 1
    graph.lint()


def test_left_alone_when_the_table_is_written_to_before_the_rows_are_used():
    def function(table, hidden, ids):
        hidden = hidden @ hidden
        rows = lookup(table, ids)
        table.mul_(2)
        return rows * hidden.sum()

    graph, report = trace(function, torch.randn(50, 4), torch.randn(3, 3), torch.arange(6)), GraphReport()
    assert prefetch_lookup(graph, report, prefetch_distance=1) == 0
    assert "writes to the table" in report.declines()[0].reason


@pytest.mark.parametrize(
    ("make_ids", "reason"),
    [
        (lambda table, ids: torch.randint(0, 50, (6,)), "random"),
        (lambda table, ids: ids.add_(1) * 2, "writes to memory"),
        (lambda table, ids: lookup(table, ids).argmax(-1), "rows of another lookup"),
    ],
)
def test_left_alone_when_the_ids_have_a_history(make_ids, reason):
    graph = trace(lambda table, ids: lookup(table, make_ids(table, ids)) * 2, torch.randn(50, 4), torch.arange(6))
    report = GraphReport()
    count = prefetch_lookup(graph, report, prefetch_distance=1)
    assert count == len(graph.find_nodes(op="call_function", target=lookup_start))
    (decline,) = report.declines()
    assert reason in decline.reason


@pytest.mark.parametrize(
    "spoil",
    [
        lambda model: setattr(model.layers[2].ngrams.table, "max_norm", 1.0),
        lambda model: model.layers[2].ngrams.table.weight.requires_grad_(True),
    ],
)
def test_a_table_that_the_forward_writes_to_or_that_trains_is_not_taken_over(spoil):
    model = offloaded(2)
    spoil(model)
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(host_tables.take_over(gm, list(example_inputs), Config())[0])
        return gm.forward

    torch.compile(model, backend=backend)(*model.inputs())
    assert graphs and not any(graphs)


def outline(graph):
    """The lookups, the ops around them and the products of a graph, by layer; `<- x`: only after x."""
    lines = []
    for node in graph.nodes:
        target, after = node.target, ""
        if str(target) == "control_deps":
            inner = getattr(graph.owning_module, node.args[1].target).graph
            (target,) = [n.target for n in inner.nodes if n.op == "call_function"]
            after = f" <- {', '.join(n.name for n in node.args[0])}"
        name = str(target).removesuffix(".default")
        if node.op != "call_function" or not (name.startswith("ple.") or name in ("aten.mm", "aten.bmm", "aten.addmm")):
            continue
        stack = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())[-1][0]
        layer = re.search(r"layers\.\d+|$", stack).group()
        arguments = f"({', '.join(str(a) for a in node.args)})" if target in (lookup_start,) else ""
        lines.append(f"{layer:<9} {node.name}: {name}{arguments}{after}")
    return "\n".join(lines) + "\n"


def traced(model, *args, **config):
    """What the passes make of the one graph of a model whose tables are taken over."""
    found, settings = Traced(), Config(**config)

    def backend(gm, example_inputs):
        replaced = list(example_inputs)
        tables, _ = host_tables.take_over(gm, replaced, settings)
        compiled = passes_backend(found, settings)(gm, replaced)
        return lambda *args: compiled(*host_tables.views(tables, args))

    torch._dynamo.reset()
    with torch.no_grad():
        actual = torch.compile(model, backend=backend, fullgraph=True)(*args)
        expected = model(*args)
    assert not [reason for name, reason in found.declines() if name == "prefetch_lookup"]
    return found, actual, expected


@pytest.mark.parametrize(
    ("distance", "order"), [(1, "start start wait start wait wait"), (2, "start start start wait wait wait")]
)
def test_lookups_where_other_lookups_are(distance, order):
    """Layer 0 begins with its lookup, where the one of layer 1 starts."""
    model = offloaded(0, 1, 2, num_layers=3)
    found, actual, expected = traced(model, *model.inputs(), prefetch_distance=distance)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert found.counts()["prefetch_lookup"] == 3
    halves = re.findall(r"ple.lookup_(start|wait)", outline(found.graphs[0].graph))
    assert " ".join(halves) == order


@recorded
def test_the_reference_model_with_tables_in_its_first_second_and_fourth_layer():
    torch.manual_seed(0)
    model = TextModel(tiny(ple_layer_ids=(1, 2, 4))).eval().requires_grad_(False)
    offload_tables(model)
    found, actual, expected = traced(model, torch.randint(4, 50, (1, 6)))
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-6)
    assert found.counts()["prefetch_lookup"] == 3
    assert_expected("prefetch_lookup.reference", outline(found.graphs[0].graph))


@recorded
def test_the_transformers_model():
    model = make_model(ple_layer_ids=[2]).requires_grad_(False)
    offload_tables(model)
    undo = whole_graph.apply(model)
    try:
        found, actual, expected = traced(model, torch.randint(4, 90, (1, 9)))
    finally:
        undo()
    torch.testing.assert_close(actual.logits, expected.logits, rtol=2e-5, atol=1e-5)
    assert found.counts()["prefetch_lookup"] == 1
    assert_expected("prefetch_lookup.transformers", outline(found.graphs[0].graph))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="control_deps runs in generated code only, not in eager PyTorch")
def test_debug_checks_the_ids_before_the_lookup_starts():
    model = offloaded(2)
    found, actual, expected = traced(model, *model.inputs(), debug=True)
    assert torch.equal(actual, expected) and found.counts()["prefetch_lookup"] == 1
    targets = [str(node.target) for node in found.graphs[0].graph.nodes]
    assert targets.index("ple.checked_ids.default") < targets.index("ple.lookup_start.default")


def test_the_reader_of_the_rows_decides_where_the_wait_goes():
    """Not the lookup's own place, which in a functional graph is anywhere."""

    def function(table, hidden, ids, weight):
        rows = lookup(table, ids).reshape(3, -1) @ weight
        for _ in range(3):
            hidden = torch.tanh(hidden @ hidden)
        return hidden + rows

    arguments = torch.randn(50, 4), torch.randn(3, 3), torch.arange(6), torch.randn(8, 3)
    graph = trace(function, *arguments)
    assert prefetch_lookup(graph, GraphReport(), prefetch_distance="earliest") == 1
    names = [n.name for n in graph.nodes if n.op == "call_function"]
    assert [n for n in names if n.startswith(("mm", "lookup"))] == [
        "lookup_start_default",
        "mm_1",
        "mm_2",
        "mm_3",
        "lookup_wait_default",
        "mm",
    ]
    (wait,) = [n for n in graph.nodes if n.name == "lookup_wait_default"]
    assert [n.name for n in wait.args[0]] == ["mm_3"] and not graph.find_nodes(op="call_function", target=lookup_wait)


def test_pinned_memory_counts_too(monkeypatch):
    """A table that someone else page-locked needs no registration of ours."""
    model = Stack(2)
    address = model.layers[2].ngrams.table.weight.data_ptr()
    monkeypatch.setattr(pinning, "is_page_locked", lambda tensor: tensor.data_ptr() == address)
    assert run(model) == "mm mm start mm mm wait mm mm mm mm mm"
