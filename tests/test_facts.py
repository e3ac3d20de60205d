"""Where a report says that a table lies, and in which format."""

import torch
from torch import nn

from ple_compile import offload_tables, quantize_tables, shard_tables
from ple_compile.facts import TableFacts, environment, table_facts
from tests.fake_driver import driver  # noqa: F401
from tests.sharding.fake import fake_mesh
from tests.sharding.lowered import NGrams


def facts(model: nn.Module) -> TableFacts:
    (found,) = table_facts(model)
    return found


def test_a_plain_table() -> None:
    assert facts(NGrams(50)) == TableFacts("rows.weight", 50, 8, "bfloat16", "CPU memory", "", 50 * 8 * 2)
    assert facts(NGrams(50).to("meta")).placement == "meta device"
    assert table_facts(nn.Linear(2, 2)) == []


def test_a_quantised_table() -> None:
    for kind in ("fp8", "nvfp4"):
        model = NGrams(64, 32)
        quantize_tables(model, kind)
        assert (facts(model).format, facts(model).width) == (kind, 32)


def test_host_tables(driver: object) -> None:  # noqa: F811
    model = NGrams(1024, 64)
    assert facts(model).placement == "pageable host memory"
    offload_tables(model)
    assert facts(model).placement == "page-locked host memory"
    offload_tables(model, gpu_cache_bytes=2**16)
    assert facts(model).placement.startswith("page-locked host memory, ")
    assert facts(model).placement.endswith(" rows cached on the GPU")


def test_a_sharded_table() -> None:
    model = NGrams(101)
    with fake_mesh(rank=1, tp=4) as mesh:
        shard_tables(model, mesh)
        found = facts(model)
    assert (found.rows, found.sharding) == (101, "rank 1 of 4 holds 26 rows")


def test_the_environment() -> None:
    told = environment()
    assert told["torch"] == torch.__version__ and "device" in told
    assert told["device"].startswith("CPU") != torch.cuda.is_available()
