"""The operator: turns each FastGenDeployment into pods and keeps them as its spec says."""
