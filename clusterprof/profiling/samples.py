"""Samples: which prompts of a dataset are tuned on, and which others judge the result."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterprof.data import Dataset, Prompt, Row, build_prompt, sample_rows
from clusterprof.errors import DataError
from clusterprof.models import describe_model
from clusterprof.profiling.settings import TuneSettings
from clusterprof.statistics import FEWEST_TO_TELL

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Samples:
    """Prompts drawn from a dataset, no row twice.

    Attributes
    ----------
    tuning : tuple of Prompt
        What the search sees.
    held_out : tuple of Prompt
        What it does not see.
    """

    tuning: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]

    def longer_than(self, size: int) -> "Samples":
        """Those that there is something to compress of."""
        return Samples(_longer(self.tuning, size), _longer(self.held_out, size))


def draw_samples(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    dataset: Dataset,
    settings: TuneSettings,
) -> Samples:
    """Draw rows and build their prompts, cut to what the model's context leaves beside the decoded tokens.

    Raises
    ------
    DataError
        If that is not more than a size, if all prompts of the tuning sample fit in one, if too few are held out to
        decide about values per layer, or to ever show the target, if both are asked for, or if the window is a
        prompt's question and that is not known, or takes all of a size in every prompt.
    """
    rows = _rows_to_tune_on(dataset, settings)
    drawn = {row.id for row in rows}
    rest = replace(dataset, rows=tuple(row for row in dataset.rows if row.id not in drawn))
    wanted = settings.holdout
    if wanted is None:
        needed = 0 if settings.target is None else settings.target.prompts_needed
        wanted = max(len(rows), FEWEST_TO_TELL, needed)
    held_out = sample_rows(rest, samples=wanted, seed=settings.seed) if wanted and rest.rows else ()
    samples = Samples(*(_prompts(model, tokenizer, part, settings) for part in (rows, held_out)))
    for size in settings.sizes:
        longer = samples.longer_than(size).tuning
        if not longer:
            longest = max(len(prompt.input_ids) for prompt in samples.tuning)
            raise DataError(
                f"All {len(samples.tuning)} sampled prompts of {dataset.name} fit in --size {size} (the longest has "
                f"{longest} tokens), so there is nothing to compress; choose a smaller --size or longer prompts."
            )
        judges = len(samples.longer_than(size).held_out)
        if settings.per_layer and judges < FEWEST_TO_TELL:
            raise DataError(
                f"--per-layer needs at least {FEWEST_TO_TELL} held-out prompts, which decide whether its values stay, "
                f"and {judges} of {dataset.name} can be used at --size {size}; give more data, raise --holdout, or "
                "lower --fraction or --samples."
            )
        shortest = min(prompt.query_length or 0 for prompt in longer)
        if settings.window == "query" and shortest >= size:
            raise DataError(
                f"The question of every sampled prompt of {dataset.name} takes all of --size {size} (the shortest has "
                f"{shortest} tokens); choose a larger --size, or use --window N."
            )
    for size in sorted(settings.sizes, reverse=True):
        _check_target(samples, dataset, settings, size)
    return samples


def _rows_to_tune_on(dataset: Dataset, settings: TuneSettings) -> tuple[Row, ...]:
    samples = settings.samples
    if samples is None:
        if settings.fraction is not None:
            return sample_rows(dataset, fraction=settings.fraction, seed=settings.seed)
        # 20 % of few rows show nothing, and without other rows nothing would be known of the result.
        count = len(dataset.rows)
        samples = max(round(0.2 * count), min(FEWEST_TO_TELL, count // 2), 1)
    return sample_rows(dataset, samples=samples, seed=settings.seed)


def _check_target(samples: Samples, dataset: Dataset, settings: TuneSettings, size: int) -> None:
    if settings.target is None:
        return
    # A choice made on the prompts that then test it would pass the test too often.
    if settings.per_layer:
        raise DataError(
            "--per-layer decides by the held-out prompts whether its values stay, so they cannot show a --target as "
            "well; give one of the two."
        )
    prompts, needed = samples.longer_than(size).held_out, settings.target.prompts_needed
    if settings.window == "query":
        prompts = tuple(prompt for prompt in prompts if (prompt.query_length or 0) < size)
    if len(prompts) >= needed:
        return
    holdout = len(samples.held_out) + needed - len(prompts)
    others = len(dataset.rows) - len(samples.tuning)
    if holdout <= others:
        advice = f"raise --holdout from {len(samples.held_out)} to {holdout}"
        advice += "." if len(prompts) == len(samples.held_out) else " or more."
    else:
        advice = (
            f"{dataset.name} has {others} rows besides the {len(samples.tuning)} that are tuned on: give more data, "
            "tune on fewer rows (--samples), or lower --target-share."
        )
    raise DataError(
        f"That {100 * settings.target.share:g} % of prompts meet --target {settings.target} takes at least {needed} "
        f"held-out prompts to show at --size {size}, and {len(prompts)} can be used there; {advice}"
    )


def _longer(prompts: Iterable[Prompt], size: int) -> tuple[Prompt, ...]:
    return tuple(prompt for prompt in prompts if len(prompt.input_ids) > size)


def _prompts(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[Row],
    settings: TuneSettings,
) -> tuple[Prompt, ...]:
    context = describe_model(model).max_position_embeddings or sys.maxsize
    longest = context - settings.decode_tokens
    if longest <= max(settings.sizes):
        raise DataError(
            f"--decode-tokens {settings.decode_tokens} leaves {max(longest, 0)} tokens of the model's context of "
            f"{context} for a prompt, which must be longer than --size {max(settings.sizes)}; lower one of the two."
        )
    prompts = tuple(build_prompt(row, tokenizer, max_tokens=longest) for row in rows)
    if settings.window == "query":
        for row, prompt in zip(rows, prompts, strict=True):
            if prompt.query_length is None:
                raise DataError(_unknown_question(row))
    return prompts


def _unknown_question(row: Row) -> str:
    if row.question_start is None:
        return (
            f"--window query needs each prompt's question, and row {row.id!r} does not tell it from the rest; "
            "give rows with 'context' and 'question', or use --window N."
        )
    return (
        f"--window query needs to know which tokens are the question, and in row {row.id!r} it cannot be found "
        "among the prompt's (the tokenizer is not a fast one, or its chat template rewrites the text); "
        "use --window N."
    )
