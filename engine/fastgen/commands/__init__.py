"""The commands of `fastgen`, one a module: `add` says what its arguments are, `run` does it."""
