"""Tokenizers as model files store them: the tokenizers library's object, special tokens and chat templates."""
