"""Test harness of the operator: its process, and namespaces of a bare control plane."""
