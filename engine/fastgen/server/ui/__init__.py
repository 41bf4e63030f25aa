"""The page of `fastgen serve --ui`: its files, and the stream of steps that it shows."""
