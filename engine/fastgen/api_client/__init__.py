"""A client of a running FastGen server, on the standard library alone."""
