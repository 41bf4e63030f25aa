"""`kubectl fastgen`: show and test FastGenDeployments with the user's own rights."""
