"""Record: the parts of a profile that say what a tune was run on and what came out."""

import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch
import transformers
from pydantic import ValidationError

import clusterprof
from clusterprof.data import Dataset
from clusterprof.errors import DataError
from clusterprof.profile import (
    Baseline,
    DatasetRecord,
    Difference,
    Environment,
    Full,
    Metrics,
    Results,
    Score,
    first_problem,
)
from clusterprof.profiling.judge import Judgement
from clusterprof.profiling.objective import ObjectiveName, Scores
from clusterprof.profiling.samples import Samples
from clusterprof.statistics import Estimate, mean_estimate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def results_record(
    tuning: Sequence[Scores], judgement: Judgement, objective: ObjectiveName, seed: int
) -> Results:
    """The tuned method on the tuning samples, and it and its baselines on those that judge."""
    tuned, *baselines = judgement.methods
    return Results(
        tuning=_score(tuning, objective, seed),
        held_out=_score(judgement.tuned, objective, seed) if judgement.held_out else None,
        metrics=Metrics(**asdict(tuned.scores)),
        baselines=tuple(
            Baseline(
                method=result.method or Full(),
                overrides=result.overrides,
                metrics=Metrics(**asdict(result.scores)),
                difference=None if result.behind is None else _difference(result.behind),
            )
            for result in baselines
        ),
    )


def _score(samples: Sequence[Scores], objective: ObjectiveName, seed: int) -> Score:
    estimate = mean_estimate([scores[objective] for scores in samples], seed=seed)
    return Score(
        objective=objective,
        value=estimate.mean,
        interval_95=_interval(estimate),
        samples=estimate.samples,
    )


def _difference(estimate: Estimate) -> Difference:
    return Difference(value=estimate.mean, interval_95=_interval(estimate))


def _interval(estimate: Estimate) -> tuple[float, float] | None:
    return None if estimate.low is None or estimate.high is None else (estimate.low, estimate.high)


def dataset_record(
    dataset: Dataset, samples: Samples, *, size: int, seed: int, tokens: int | None
) -> DatasetRecord:
    """Which rows of which data were drawn, and what became of their prompts.

    Raises
    ------
    DataError
        If a profile cannot hold it, such as a name with a line break.
    """
    try:
        return DatasetRecord(
            name=dataset.name,
            source=dataset.source,
            split=dataset.split or None,
            fraction=len(samples.tuning) / len(dataset.rows),
            seed=seed,
            rows=len(dataset.rows),
            sampled_ids=tuple(prompt.id for prompt in samples.tuning),
            held_out_ids=tuple(prompt.id for prompt in samples.held_out),
            content_hash=dataset.content_hash,
            prompts_cut=sum(prompt.tokens_cut > 0 for prompt in samples.tuning),
            prompts_fitting=sum(len(prompt.input_ids) <= size for prompt in samples.tuning),
            tokens=tokens,
        )
    except ValidationError as error:
        raise DataError(
            f"A profile could not say what it was tuned on: {first_problem(error)}; rename it, or shorten it."
        ) from error


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
