"""Finding PLE layers in a model, by what they hold."""

from torch import nn

from ple_compile.tables.find import find_tables


def find_ple_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every PLE layer by qualified name: the parent of a module that owns an n-gram table and its hash buffers.

    A model that is itself such an owner is its own PLE layer, under the name "".
    """
    owners = {id(table.owner) for table in find_tables(model)}
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if id(module) in owners:
            parent = name.rpartition(".")[0]
            layers[parent] = model.get_submodule(parent)
    return layers
