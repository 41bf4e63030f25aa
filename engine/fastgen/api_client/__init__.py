"""A client of a running FastGen server. Only its parser of metrics needs more than the standard library."""
