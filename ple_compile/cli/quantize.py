"""Write the n-gram tables of a checkpoint in a smaller format.

Reads the tables of CHECKPOINT (a transformers folder with safetensors files) block by block and writes them to
OUT/ngram_tables.safetensors; neither the table nor its copy is ever held in memory. A run that was stopped goes on
where it was when the same command is given again. The rest of the model stays in CHECKPOINT:

  ple_compile.load_tables(model, OUT)

brings the tables of OUT into a model.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import torch

from ple_compile.cli.target import config_of, import_transformers
from ple_compile.tables.find import find_tables
from ple_compile.tables.formats import FORMATS
from ple_compile.tables.load import load_tables
from ple_compile.tables.quantize import quantize_tables
from ple_compile.tables.save import refuse_tables_in

FILE = "ngram_tables.safetensors"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="folder with config.json and safetensors")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for the quantised tables; made if need be")
    parser.add_argument("--format", choices=FORMATS, required=True, help="what the tables become")
    parser.add_argument("--json", action="store_true", help="print the errors as JSON")


def run(options: argparse.Namespace) -> int:
    transformers = import_transformers()
    config = config_of(options.checkpoint)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config.get_text_config())
    tables = find_tables(model)
    if not tables:
        raise ValueError(f"{options.checkpoint} is a {type(model).__name__} without PLE layers: it has no n-gram table")
    file = options.out / FILE
    if file.exists():
        raise ValueError(f"{file} is there and complete; delete it, or choose another folder")
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"{options.out} is a file; name a folder for the quantised tables")
    refuse_tables_in(options.out, tables)
    load_tables(model, options.checkpoint, format="mmap")
    options.out.mkdir(parents=True, exist_ok=True)
    errors = quantize_tables(model, options.format, path=file)
    if options.json:
        print(json.dumps({"file": str(file), "tables": [dataclasses.asdict(error) for error in errors]}, indent=1))
    else:
        print("\n".join([*map(str, errors), f"wrote {file}"]))
    return 0
