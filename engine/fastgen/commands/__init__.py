"""The commands of `fastgen`, one per module: `add` defines its arguments, `run` executes it."""
