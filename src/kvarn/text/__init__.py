"""Text in and out: tokenizers, streaming detokenization, chat templates."""

from kvarn.text.chat import ChatTemplate
from kvarn.text.detokenizer import Detokenizer
from kvarn.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "Tokenizer"]
