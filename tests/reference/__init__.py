"""Slow references, written from the method's steps alone, that the package is compared with."""
