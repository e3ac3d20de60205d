"""Real text without a download: the prose that installed Python packages carry, tokenised by a BPE trained on it.

Docstrings and .rst / .md / .txt files, each paragraph once. Packages go to one of two sides by a hash of their name,
so the text that fills a cache and the text that measures it share no package and no paragraph.
"""

import argparse
import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = 0


def read_prose(folder: Path | None = None, max_bytes: int = 64 * 2**20) -> tuple[list[str], list[str]]:
    """(filling, measuring) documents, up to `max_bytes` together, a quarter of the packages measuring."""
    folder = folder or Path(sysconfig.get_path("purelib"))
    sides: tuple[list[str], list[str]] = ([], [])
    seen: set[bytes] = set()
    total = 0
    for package in sorted(folder.iterdir(), key=lambda path: _digest(path.name)):
        measuring = _digest(package.name)[-1] % 4 == 0
        for document in _documents(package):
            paragraphs = [part for part in document.split("\n\n") if len(part) > 40]
            fresh = [part for part in dict.fromkeys(paragraphs) if _digest(part) not in seen]
            seen.update(map(_digest, fresh))
            if fresh:
                sides[measuring].append("\n\n".join(fresh))
                total += len(sides[measuring][-1])
        if total > max_bytes:
            break
    return sides


def _digest(text: str) -> bytes:
    return hashlib.sha1(text.encode(errors="ignore")).digest()


def _documents(package: Path) -> Iterator[str]:
    for path in sorted(package.rglob("*")) if package.is_dir() else [package]:
        if path.suffix in (".rst", ".md", ".txt") and path.is_file():
            yield path.read_text(errors="ignore")
        elif path.suffix == ".py" and path.is_file():
            yield "\n\n".join(_docstrings(path.read_text(errors="ignore")))


def _docstrings(source: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [text for text in found if text]


def train_tokenizer(documents: list[str], vocab_size: int = 32_768) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> torch.Tensor:
    """All documents as one stream of token ids, EOS after each."""
    encoded = tokenizer.encode_batch(documents)
    return torch.from_numpy(np.concatenate([np.array([*one.ids, EOS], dtype=np.int64) for one in encoded]))


def load_tokens(path: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(filling, measuring) token streams, from a file that `main` wrote or made afresh (two minutes)."""
    if path is not None:
        saved = np.load(path)
        return tuple(torch.from_numpy(saved[name].astype(np.int64)) for name in ("filling", "measuring"))  # type: ignore[return-value]
    filling, measuring = read_prose()
    tokenizer = train_tokenizer(filling)
    return encode(tokenizer, filling), encode(tokenizer, measuring)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokenise the prose of the installed packages, for host_table.py.")
    parser.add_argument("--out", type=Path, required=True, help="an .npz file")
    out = parser.parse_args().out
    filling, measuring = load_tokens(None)
    # 32,768 entries fit 16 bits.
    streams = {"filling": filling.numpy().astype(np.uint16), "measuring": measuring.numpy().astype(np.uint16)}
    np.savez_compressed(out, **streams)


if __name__ == "__main__":
    main()
