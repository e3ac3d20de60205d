"""transformers' Qwen4Exp as one graph: replacements for what Dynamo cannot capture, put on a model's own modules."""

from ple_compile.whole_graph.apply import OwnForward, Undo, apply, apply_indexer, clean_copy, has_indexer, text_models
from ple_compile.whole_graph.cache import prepare_cache

__all__ = ["OwnForward", "Undo", "apply", "apply_indexer", "clean_copy", "has_indexer", "prepare_cache", "text_models"]
