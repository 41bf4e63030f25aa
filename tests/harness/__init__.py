"""The operator under test: its process, and the namespace of a control plane that a test plays the nodes of."""
