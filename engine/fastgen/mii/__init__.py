"""The habits of DeepSpeed-MII's users: a pipeline in this process, and servers that outlive it.

docs/from-deepspeed-mii.md maps each of its calls and arguments to ours.
"""
