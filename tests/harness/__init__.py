"""Test harness of the operator: its process, and namespaces of a control plane without nodes."""
