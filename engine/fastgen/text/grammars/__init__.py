"""Structured output: from the grammar of a request to the tokens that may follow.

A request has a `core.sampling_params.Grammar`: a JSON schema, a regular expression, a Lark grammar or a set of tokens.
`lark` composes those of tools and reasoning, and `schemas` rewrites JSON schemas to what the library enforces.

The HTTP process, or `LLM`, checks it: `checker` has it tried by a child process (`checker_process`), which compiles it
and follows it for a while (`rehearsal`). Rules without a match, or without one that ends (`endings`), are found in Lark
grammars by `empty_rules` (with the values of `parameters`), and in schemas by `schemas.recursion`. The engine compiles
it again (`compiler`) and keeps it (`compiled`). Each sequence has a `matcher` in it, and `masks` computes what the
sequences of a step may generate. `limits` has the limits.
"""
