"""kvarn: an inference engine for language models whose KV cache is the product."""

__version__ = "0.1.0"
