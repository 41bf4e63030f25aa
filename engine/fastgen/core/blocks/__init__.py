"""KV blocks of sequences: the pool, the prefix cache, preemption and swapping."""
