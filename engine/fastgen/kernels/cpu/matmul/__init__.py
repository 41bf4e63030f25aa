"""Matrix products with float32 and bfloat16 weights, and with weights of eight bits and fewer."""
