"""The model that a command was given: a transformers checkpoint, a config.json, or a Python file."""

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


class CodeFailedError(RuntimeError):
    """The user's own code raised; the cause is its error."""


@contextlib.contextmanager
def users_code() -> Iterator[None]:
    """Runs code that is not this package's: its errors keep their traceback, and stdout is the report's alone."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (ValueError, OSError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").startswith("ple_compile."):
            raise
        raise CodeFailedError from error
    except SystemExit as stop:
        raise ValueError(
            f"the model's file ends the process, by exit({stop.code!r}); put what a script does under "
            "if __name__ == '__main__':"
        ) from None


Call = tuple[Any, tuple, dict[str, Any]]  # model, args, kwargs


def load(
    target: str, device: torch.device | None, dtype: torch.dtype | None, changes: dict[str, Any], num_tokens: int
) -> Call:
    """The model and the inputs to call it with.

    `device`: for a checkpoint the GPU where there is one, for a file what the file chose, unless given.
    """
    file, _, name = target.partition(".py:")
    if name or target.endswith(".py"):
        if changes:
            raise ValueError("--config: a Python file makes its own model; change it there")
        path = Path(f"{file}.py" if name else target)
        model, args, kwargs = _from_file(path, name or "model")
    else:
        if device is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model, args, kwargs = pretrained(Path(target), device, dtype, changes), (), {}
    if isinstance(model, nn.Module):
        model.eval().to(device=device, dtype=dtype)
        if not args and not kwargs:
            args = (_token_ids(model, num_tokens),)
    if device is not None:
        args, kwargs = tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    return model, args, kwargs


def _token_ids(model: nn.Module, num_tokens: int) -> torch.Tensor:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ValueError(
            f"{type(model).__name__} came without inputs, and has no transformers config that tells its vocabulary; "
            "return (model, args) or set `inputs` in the file"
        )
    parameter = next(model.parameters())
    size = config.get_text_config().vocab_size
    ids = torch.randint(0, size, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    return ids.to(parameter.device)


def pretrained(path: Path, device: torch.device, dtype: torch.dtype | None, changes: dict[str, Any]) -> nn.Module:
    """A transformers model: its weights where the folder has them, else random ones."""
    transformers = import_transformers()
    from huggingface_hub.errors import StrictDataclassError  # both come with transformers
    from safetensors import SafetensorError

    config = config_of(path)
    settings = {} if dtype is None else {"dtype": dtype}
    if path.is_dir() and (any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin"))):
        if changes:
            raise ValueError(f"--config: {path} has weights, which fit its own config only; pass its config.json alone")
        try:
            return transformers.AutoModelForCausalLM.from_pretrained(path, **settings).to(device)
        except SafetensorError as error:
            raise ValueError(f"{path}: its weights cannot be read: {error}") from None
    text = config.get_text_config()
    for name in changes:
        if not hasattr(text, name):
            raise ValueError(f"--config {name}: {type(text).__name__} has no such field")
    # Built anew: what a config derives from its fields (the kinds of its layers) follows the changes.
    derived = {"layer_types"} if "num_hidden_layers" in changes and "layer_types" not in changes else set()
    fields = {name: value for name, value in text.to_dict().items() if name not in derived}
    try:
        text = type(text)(**(fields | changes))
    except StrictDataclassError as reason:
        raise ValueError(f"--config: {reason}") from None
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(text, **settings)


def config_of(path: Path) -> Any:
    """The transformers config of a folder or of a config.json."""
    transformers = import_transformers()
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a checkpoint folder, a config.json or FILE.py[:NAME]")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json, so it is no transformers checkpoint")
    return transformers.AutoConfig.from_pretrained(path)


def import_transformers() -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("a checkpoint needs transformers: pip install 'ple-compile[transformers]'")
    return importlib.import_module("transformers")


def _from_file(path: Path, name: str) -> Call:
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    module_name = f"ple_compile_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.resolve().parent))  # as Python does for a script
    with users_code():
        spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"{path} has no {name!r}; name the model, or a function that returns it, as {path}:NAME")
    found = getattr(module, name)
    if callable(found) and not isinstance(found, nn.Module) and not _arguments_of(found):
        with users_code():
            found = found()
    model, args, kwargs = (*found, (), {})[:3] if isinstance(found, tuple) else (found, (), {})
    if not callable(model):
        raise ValueError(
            f"{path}:{name} gives a {type(model).__name__}; a model, (model, args) or (model, args, kwargs)"
        )
    inputs = getattr(module, "inputs", ())
    if not args and not kwargs:
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (_as_tuple(inputs), {})
    args, kwargs = _as_tuple(args), dict(kwargs)
    if not isinstance(model, nn.Module) and not args and not kwargs and _arguments_of(model):
        needed = ", ".join(_arguments_of(model))
        raise ValueError(
            f"{path}:{name} takes {needed}; give a function without arguments, or set `inputs` in the file"
        )
    return model, args, kwargs


def _arguments_of(function: Any) -> list[str]:
    """Arguments that must be given."""
    parameters = inspect.signature(function).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _as_tuple(args: Any) -> tuple:
    return tuple(args) if isinstance(args, (tuple, list)) else (args,)
