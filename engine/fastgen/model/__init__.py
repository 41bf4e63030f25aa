"""What lies at MODEL and how a forward pass over it is run.

`errors`, `gguf`, `dequantise`, `architecture` and `source` import neither torch nor numba: the HTTP process reads a
model's shape and tokenizer with them. Everything else belongs to the engine process.
"""
