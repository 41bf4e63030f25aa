"""Tool-call formats of models: streaming parsers and the grammars that enforce them."""
