"""Record: the parts of a profile that say what a tune was run on and what came out."""

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch
import transformers

import clusterprof
from clusterprof.data import Dataset, Prompt
from clusterprof.methods import MethodConfig
from clusterprof.profile import Baseline, DatasetRecord, Environment, Full, Metrics, Results, Score
from clusterprof.profiling.objective import ObjectiveName, Scores
from clusterprof.statistics import interval_95

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MethodResult:
    """A method's scores on the tuning samples. ``method`` is None for the full cache."""

    label: str
    method: MethodConfig | None
    scores: Scores


def results_record(
    baselines: Sequence[MethodResult], tuned: Sequence[Scores], objective: ObjectiveName, seed: int
) -> Results:
    """The tuned method's mean over samples with its interval, and its baselines."""
    values = [scores[objective] for scores in tuned]
    return Results(
        tuning=Score(
            objective=objective,
            value=sum(values) / len(values),
            interval_95=interval_95(values, seed=seed),
            samples=len(values),
        ),
        baselines=tuple(
            Baseline(method=result.method or Full(), metrics=Metrics(**asdict(result.scores)))
            for result in baselines
        ),
    )


def dataset_record(
    dataset: Dataset, sampled: Sequence[Prompt], *, size: int, fraction: float, seed: int, tokens: int | None
) -> DatasetRecord:
    """Which rows of which data were drawn, and what became of their prompts."""
    return DatasetRecord(
        name=dataset.name,
        source=dataset.source,
        split=dataset.split or None,
        fraction=fraction,
        seed=seed,
        rows=len(dataset.rows),
        sampled_ids=tuple(prompt.id for prompt in sampled),
        content_hash=dataset.content_hash,
        prompts_cut=sum(prompt.tokens_cut > 0 for prompt in sampled),
        prompts_fitting=sum(len(prompt.input_ids) <= size for prompt in sampled),
        tokens=tokens,
    )


def environment_record(model: "PreTrainedModel") -> Environment:
    """Versions, device and backend of this process."""
    return Environment(
        clusterprof=clusterprof.__version__,
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=platform.python_version(),
        attention_backend=model.config._attn_implementation,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        created=datetime.now(UTC),
    )
