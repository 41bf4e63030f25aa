"""What was measured and how: each is a program that one command runs."""
