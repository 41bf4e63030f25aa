"""`kubectl fastgen`: what people see of FastGenDeployments in a terminal.

It reads with the user's own rights.
"""
