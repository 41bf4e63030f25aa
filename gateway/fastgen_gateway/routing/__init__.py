"""The decisions of the picker. Pure: no I/O, and the clock is an argument."""
