"""Workloads: named datasets, local files, generators, sampling, and the prompts a model reads."""

from clusterprof.data.loading import DEFAULT_TOKENS, DatasetInfo, list_datasets, load_dataset
from clusterprof.data.prompts import Prompt, build_prompt
from clusterprof.data.rows import Dataset, Message, Row
from clusterprof.data.sampling import drawing_order, sample_rows

__all__ = [
    "DEFAULT_TOKENS",
    "Dataset",
    "DatasetInfo",
    "Message",
    "Prompt",
    "Row",
    "build_prompt",
    "drawing_order",
    "list_datasets",
    "load_dataset",
    "sample_rows",
]
