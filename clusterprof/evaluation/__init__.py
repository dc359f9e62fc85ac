"""Evaluation: every method on one prefill per prompt, one file per benchmark, results as JSON lines."""
