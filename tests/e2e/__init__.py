"""End-to-end tests. A package, so that fixtures of package scope end with its last test."""
