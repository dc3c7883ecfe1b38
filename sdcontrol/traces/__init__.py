"""Recorded runs: written, read, replayed."""
