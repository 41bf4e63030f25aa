"""The subcommands of `kubectl fastgen`, one file for each."""
