"""One run: its problem, its round loop and its record."""
