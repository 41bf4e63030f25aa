"""FastGen: Dynamic SplitFuse serving over a paged KV cache."""
