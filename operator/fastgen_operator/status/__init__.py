"""The status of a FastGenDeployment and its conditions. Pure."""
