"""A readable Qwen4Exp in plain PyTorch, with its parameters named as in transformers.

Weights of a `Qwen4ExpForCausalLM` load as they are, and so do the text weights of a `Qwen4ExpForConditionalGeneration`:

    model = ForCausalLM(Config.from_transformers(hf.config))
    model.load_state_dict(hf.state_dict())

    model = ForCausalLM(Config.from_transformers(hf.config.text_config))
    model.load_state_dict(text_weights(hf.state_dict()))

`packed` and `packed_model` run the same weights on ragged batches, as servers do.
"""

from .cache import Cache
from .config import Config, flash_next, tiny
from .model import ForCausalLM, text_weights

__all__ = ["Cache", "Config", "ForCausalLM", "flash_next", "text_weights", "tiny"]
