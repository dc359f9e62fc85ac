"""The generators that come with the package; their text is the machine's own CPython."""

from clusterprof.data.builtin.generator import GENERATORS, ROWS, generate_dataset

__all__ = ["GENERATORS", "ROWS", "generate_dataset"]
