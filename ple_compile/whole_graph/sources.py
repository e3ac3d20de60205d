"""Which transformers sources the replacements were written against: a digest per class of the methods they rely on."""

import hashlib
import inspect
from types import ModuleType

_RELIED_ON = {
    "Qwen4ExpTextQSAIndexer": ["__init__", "forward"],
    "Qwen4ExpTextAttention": ["forward"],
    "Qwen4ExpTextGatedDeltaNet": ["__init__", "forward"],
    "Qwen4ExpTextPLELayer": ["__init__", "_short_conv", "forward"],
    "Qwen4ExpTextNGramEmbedding": ["forward"],
    "Qwen4ExpTextRMSNorm": ["forward"],
    "Qwen4ExpTextModel": ["forward"],
    "apply_rotary_pos_emb": [],
    "torch_chunk_gated_delta_rule": [],
    "LinearAttentionLayer": ["lazy_initialization", "update_conv_state", "update_recurrent_state"],
    "StaticIndexedLayer": ["lazy_initialization_indexer", "update_indexer", "reset"],
    "StaticLayer": ["lazy_initialization", "update"],
}

# transformers release -> name -> first digits of the SHA-256 of its sources.
KNOWN = {
    "5.17.0": {
        "Qwen4ExpTextQSAIndexer": "5deb7ed047e6",
        "Qwen4ExpTextAttention": "4b4c94843d05",
        "Qwen4ExpTextGatedDeltaNet": "33127744da25",
        "Qwen4ExpTextPLELayer": "e18ee6bbd8ea",
        "Qwen4ExpTextNGramEmbedding": "07c0e8b547fe",
        "Qwen4ExpTextRMSNorm": "4ea581d26b40",
        "Qwen4ExpTextModel": "f8903fcd2040",
        "apply_rotary_pos_emb": "99240d095465",
        "torch_chunk_gated_delta_rule": "e4116a769851",
        "LinearAttentionLayer": "2a335ff667c2",
        "StaticIndexedLayer": "b2d447f57a1c",
        "StaticLayer": "d92d3961aaab",
    },
    "5.24.0": {
        "Qwen4ExpTextQSAIndexer": "26e9b1cba0d2",
        "Qwen4ExpTextAttention": "444d6c7e850d",
        "Qwen4ExpTextGatedDeltaNet": "69ca79ec7c21",
        "Qwen4ExpTextPLELayer": "11b06616cced",
        "Qwen4ExpTextNGramEmbedding": "aca420965099",
        "Qwen4ExpTextRMSNorm": "4ea581d26b40",
        "Qwen4ExpTextModel": "253a682ead8d",
        "apply_rotary_pos_emb": "99240d095465",
        "torch_chunk_gated_delta_rule": "a1bbf783aa65",
        "LinearAttentionLayer": "2a335ff667c2",
        "StaticIndexedLayer": "b72cb3b64d70",
        "StaticLayer": "b48100792a47",
    },
}


def digests(modeling: ModuleType, cache_utils: ModuleType) -> dict[str, str]:
    """The digest of every class and function that the replacements rely on."""
    found = {}
    for name, methods in _RELIED_ON.items():
        owner = getattr(modeling, name, None) or getattr(cache_utils, name)
        texts = [inspect.getsource(getattr(owner, method)) for method in methods] or [inspect.getsource(owner)]
        found[name] = hashlib.sha256("".join(texts).encode()).hexdigest()[:12]
    return found


def check(modeling: ModuleType, cache_utils: ModuleType, version: str) -> str:
    """The known release whose sources are installed; else a ValueError that names what differs."""
    found = digests(modeling, cache_utils)
    differing = {release: [name for name in known if found[name] != known[name]] for release, known in KNOWN.items()}
    release, names = min(differing.items(), key=lambda item: len(item[1]))
    if names:
        raise ValueError(
            f"the whole-graph form knows Qwen4Exp as in transformers {' and '.join(KNOWN)}; the installed {version} "
            f"differs from {release} in {', '.join(names)}. Install a known release, or compile without this form."
        )
    return release
