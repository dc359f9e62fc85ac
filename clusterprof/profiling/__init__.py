"""Profiling: capture once, replay every candidate, search, and write what was found."""
