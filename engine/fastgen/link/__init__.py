"""What an API process and the engine process say to each other, without torch."""
