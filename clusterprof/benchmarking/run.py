"""Run: one benchmark from the model to everything there is to say about it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clusterprof.benchmarking.capacity import Capacity, capacities, within_context
from clusterprof.benchmarking.measure import measure
from clusterprof.benchmarking.memory import weight_bytes
from clusterprof.benchmarking.results import Decode, Prefill, decode_results, prefill_results
from clusterprof.benchmarking.settings import BenchListener, BenchSettings
from clusterprof.benchmarking.subjects import Subject
from clusterprof.models import describe_model
from clusterprof.profiling.record import environment_record


@dataclass(frozen=True)
class BenchReport:
    """What a benchmark found.

    Attributes
    ----------
    model, environment : dict
        What it ran on, JSON values.
    memory_bytes : int, optional
        What the capacities are estimated for; without it there are none.
    interrupted : bool
        Ctrl-C ended it early; what was measured until then is there.
    """

    model: dict[str, Any]
    environment: dict[str, Any]
    settings: BenchSettings
    subjects: tuple[Subject, ...]
    memory_bytes: int | None
    prefill: list[Prefill]
    decode: list[Decode]
    capacity: list[Capacity]
    interrupted: bool

    def document(self) -> dict[str, Any]:
        """Everything as JSON values."""
        subjects = []
        for subject in self.subjects:
            compression = subject.compression
            settings = None if compression is None else compression.model_dump(mode="json")
            subjects.append({**asdict(subject), "compression": settings})
        return {**asdict(self), "subjects": subjects}


def run_bench(
    model: PreTrainedModel,
    prompts: Tensor,
    subjects: Sequence[Subject],
    settings: BenchSettings,
    listener: BenchListener,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    memory: int | None = None,
) -> BenchReport:
    """Measure, and work out ratios and capacities.

    Parameters
    ----------
    prompts : Tensor
        As `clusterprof.benchmarking.measure.measure` takes them.
    tokenizer : PreTrainedTokenizerBase, optional
        For methods that need to know where words begin.
    memory : int, optional
        Bytes to estimate capacities for; by default the GPU's, and on a CPU nothing is estimated.

    Raises
    ------
    ClusterprofError
        If the model cannot be compressed, or memory cannot be measured on its device.
    """
    if memory is None and model.device.type == "cuda":
        memory = torch.cuda.get_device_properties(model.device).total_memory
    found = measure(model, prompts, subjects, settings, listener, tokenizer=tokenizer)
    prefills = prefill_results(found, subjects, settings)
    decodes = decode_results(found, subjects, settings)
    environment = environment_record(model).model_dump(mode="json")
    facts = _facts(model)
    capacity: list[Capacity] = []
    if memory is not None:
        estimated = capacities(
            prefills,
            decodes,
            weights=facts["weight_bytes"],
            memory=memory,
            # Eager attention builds a matrix of prompt by prompt.
            proportional=environment["attention_backend"] != "eager",
        )
        capacity = within_context(estimated, facts["context"])
    return BenchReport(
        model=facts,
        environment={
            **environment,
            "device_name": _device_name(model.device),
            "threads": torch.get_num_threads(),
        },
        settings=settings,
        subjects=tuple(subjects),
        memory_bytes=memory,
        prefill=prefills,
        decode=decodes,
        capacity=capacity,
        interrupted=found.interrupted,
    )


def _facts(model: PreTrainedModel) -> dict[str, Any]:
    info = describe_model(model)
    return {
        "id": info.id,
        "revision": info.revision,
        "architecture": info.architecture,
        "context": info.max_position_embeddings,
        "weight_bytes": weight_bytes(model),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
