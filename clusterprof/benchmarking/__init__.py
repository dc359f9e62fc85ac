"""Benchmarking: time and memory of prefill and decoding, with the full cache and with compressed ones."""
