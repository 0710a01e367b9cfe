"""Text in and out: tokenizers, streaming detokenization, chat templates."""
