"""A readable Qwen4Exp in plain PyTorch, with its parameters named as in transformers:

model = ForCausalLM(Config.from_transformers(hf.config))
model.load_state_dict(hf.state_dict())                   # Qwen4ExpForCausalLM
model.load_state_dict(text_weights(hf.state_dict()))     # the text side of Qwen4ExpForConditionalGeneration,
                                                         # with Config.from_transformers(hf.config.text_config)
"""

from .cache import Cache
from .config import Config, flash_next, tiny
from .model import ForCausalLM, text_weights

__all__ = ["Cache", "Config", "ForCausalLM", "flash_next", "text_weights", "tiny"]
