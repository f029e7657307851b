"""Recorded availability: intervals per device, read from several formats, and the patterns made of them."""
