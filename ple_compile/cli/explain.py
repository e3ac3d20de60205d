"""Tell what of a model is fused, what is not and why.

MODEL is one of
  a transformers checkpoint folder   its weights are loaded; with only a config.json they are random
  a config.json                      random weights
  FILE.py or FILE.py:NAME            NAME (by default `model`) is the model, or a function without arguments that
                                     returns it, or (model, args) or (model, args, kwargs) of the call to explain.
                                     Without args a variable `inputs` of the file is used: a tuple of args or a dict of
                                     kwargs.
A model without inputs is called with one row of random token ids. Models are put into evaluation mode; one that a file
makes stays where the file put it unless --device is given, and compiled as the file compiled it unless --option is.

Exit code 0: every PLE layer ran fused; 1: some did not, or there is none.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from torch import nn

import ple_compile
from ple_compile.cli import arguments
from ple_compile.cli.target import load, users_code
from ple_compile.config import Config, make_config


def add(parser: argparse.ArgumentParser) -> None:
    fields = ", ".join(item.name for item in dataclasses.fields(Config) if item.name not in ("strict", "inductor"))
    parser.add_argument("model", metavar="MODEL", help="a checkpoint folder, a config.json or FILE.py[:NAME]")
    arguments.add_device(parser)
    parser.add_argument("--dtype", choices=arguments.DTYPES, help="of the weights (default: the model's own)")
    parser.add_argument("--tokens", type=int, default=64, help="random token ids to call with (default: 64)")
    parser.add_argument(
        "--option", type=arguments.assignment, action="append", default=[], metavar="NAME=VALUE",
        help=f"a field of ple_compile.Config, may be repeated: {fields}",
    )  # fmt: skip
    parser.add_argument(
        "--config", type=arguments.assignment, action="append", default=[], metavar="NAME=VALUE",
        help="another value for a field of the model's config.json, for random weights only, may be repeated; "
        "num_hidden_layers=4 makes a large model small enough to look at",
    )  # fmt: skip
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the report too; FILE.json holds it as data")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> int:
    if options.tokens < 1:
        raise ValueError(f"--tokens {options.tokens}: a number from 1 on")
    settings = dict(options.option)
    make_config(settings)  # before a model is built: what is wrong is told at once
    if settings.get("strict"):
        raise ValueError("--option strict: the exit code says whether every layer ran fused, and the report why not")
    if options.save is not None and not options.save.absolute().parent.is_dir():
        raise ValueError(f"--save {options.save}: the folder does not exist")
    if options.save is not None and options.save.is_dir():
        raise ValueError(f"--save {options.save}: this is a folder; name a file in it")
    device = None if options.device is None else arguments.device_of(options.device)
    model, args, kwargs = load(
        options.model, device, arguments.DTYPES.get(options.dtype), dict(options.config), options.tokens
    )
    if settings and not isinstance(model, nn.Module):
        raise ValueError(f"--option: {options.model} gives a function; pass its options to torch.compile")
    if settings:  # without, what the file has compiled stays as it is
        ple_compile.compile(model, **settings)
    with users_code():
        report = ple_compile.explain(model, *args, **kwargs)
    if options.save is not None:  # first: whoever reads stdout may stop in the middle
        report.save(options.save)
        print(f"saved {options.save}", file=sys.stderr)
    print(json.dumps(report.to_dict(), indent=1) if options.json else report)
    fused = sum(graph.ple_layers for _, graph in report.graphs)
    return 0 if fused and not report.unfused() else 1
