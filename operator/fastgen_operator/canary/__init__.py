"""A new revision is tried on a share of the requests: what is measured of it, and what follows. Pure."""
