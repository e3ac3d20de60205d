"""transformers' Qwen4Exp as one graph: replacements for what Dynamo cannot capture, put on a model's own modules."""
