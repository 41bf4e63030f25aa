"""A client of a running FastGen server. Only its metrics parser needs more than the standard library."""
