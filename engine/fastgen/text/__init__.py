"""Text to tokens and back: tokenizer, chat template, incremental output, stop strings. No torch."""
