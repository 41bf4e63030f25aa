"""API compatible with DeepSpeed-MII: a pipeline in this process, and servers that outlive it.

docs/coming-from/deepspeed-mii.md maps each MII call and argument to its equivalent.
"""
