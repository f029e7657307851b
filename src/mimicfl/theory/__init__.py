"""Sections III to V of the paper at work: rates with a certificate, constants of a problem, bounds beside a measured curve."""
