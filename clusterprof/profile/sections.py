"""The sections of a profile, version 1."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field, field_validator

from clusterprof.methods import Full, MethodConfig
from clusterprof.profile.compression import Overrides
from clusterprof.profile.fields import (
    Cosine,
    Count,
    Divergence,
    FiniteJson,
    Interval,
    Label,
    Line,
    ParameterName,
    PositiveCount,
    Range,
    Reason,
    SampleId,
    Seconds,
    Sha256,
    Share,
    StorageUrl,
    UtcTime,
    Value,
)
from clusterprof.profile.section import Section

if TYPE_CHECKING:
    from pydantic import ValidationInfo
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class ModelIdentity(Section):
    """Which model was tuned, and everything about it that a profile depends on.

    Attributes
    ----------
    id : str
        Hub id or folder; empty for a model that was built, not loaded.
    revision : str, optional
        Commit, if known; recorded, not compared (see :meth:`Profile.mismatches`).
    rope : dict
        The RoPE settings of the model's configuration, JSON values.
    tokenizer_hash, chat_template_hash : str
        SHA-256 in hex; the template's is None for a model without one.
    """

    id: Line
    revision: Label | None = None
    architecture: Label
    num_hidden_layers: PositiveCount
    num_attention_heads: PositiveCount
    num_key_value_heads: PositiveCount
    head_dim: PositiveCount
    rope: FiniteJson
    tokenizer_hash: Sha256
    chat_template_hash: Sha256 | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ModelIdentity:
        """Describe a loaded model and its tokenizer."""
        from clusterprof.models import chat_template_hash, describe_model, describe_tokenizer

        info = describe_model(model)
        return cls(
            id=info.id,
            revision=info.revision,
            architecture=info.architecture,
            num_hidden_layers=info.num_hidden_layers,
            num_attention_heads=info.num_attention_heads,
            num_key_value_heads=info.num_key_value_heads,
            head_dim=info.head_dim,
            rope=info.rope,
            tokenizer_hash=describe_tokenizer(tokenizer),
            chat_template_hash=chat_template_hash(tokenizer),
        )


class DatasetRecord(Section):
    """Which samples were used.

    Attributes
    ----------
    source : str
        Hub id, file, or the built-in generator.
    fraction : float
        Share of the rows that was drawn to tune on, in (0, 1].
    rows : int
        Rows of the whole dataset.
    sampled_ids : tuple of str
        Ids, or hashes, of the rows that were drawn to tune on, at most 4096.
    held_out_ids : tuple of str
        Those of other rows, drawn to judge the result.
    content_hash : str
        SHA-256 in hex of the sampled rows' content.
    prompts_cut, prompts_fitting : int
        Prompts to tune on that were shortened to the model's context, and that were set aside because they fit in
        ``size`` as they are.
    tokens : int, optional
        Prompt length asked of a built-in generator.
    """

    name: Label
    source: Label
    split: Label | None = None
    fraction: Annotated[float, Field(gt=0, le=1)]
    seed: Count
    rows: PositiveCount
    sampled_ids: Annotated[tuple[SampleId, ...], Field(min_length=1, max_length=4096)]
    held_out_ids: Annotated[tuple[SampleId, ...], Field(max_length=4096)]
    content_hash: Sha256
    prompts_cut: Count
    prompts_fitting: Count
    tokens: PositiveCount | None = None

    @field_validator("held_out_ids")
    @classmethod
    def _not_sampled(cls, ids: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not set(ids).isdisjoint(info.data.get("sampled_ids", ())):
            raise ValueError("a row that was tuned on cannot be held out")
        return ids

    @field_validator("prompts_cut", "prompts_fitting")
    @classmethod
    def _of_those_sampled(cls, count: int, info: ValidationInfo) -> int:
        sampled = info.data.get("sampled_ids")
        if sampled and count > len(sampled):
            raise ValueError(f"it must be at most {len(sampled)}, the rows that were tuned on")
        return count


def _around_value(interval: tuple[float, float], info: ValidationInfo) -> tuple[float, float]:
    value = info.data.get("value", interval[0])
    if not interval[0] <= value <= interval[1]:
        raise ValueError(f"the value {value} must be between the ends of its interval")
    return interval


IntervalOfValue = Annotated[Interval, AfterValidator(_around_value)]


class Score(Section):
    """An objective's mean over samples, with the ends of its 95 % interval where one can be given."""

    objective: Label
    value: Value
    interval_95: IntervalOfValue | None = None
    samples: PositiveCount


class Metrics(Section):
    """How close one method's run stays to the full cache's, each a mean over the samples it was judged on.

    Attributes
    ----------
    cosine, cosine_padded : float
        Attention against the full run's, on the kept positions and on all of them.
    attention_output : float
        Cosine of the attention's outputs against the full run's.
    kl : float
        KL(full || compressed) of the next-token distributions, in nats.
    agreement : float
        Share of steps with the same greedy token.
    loss : float
        Next-token loss on the full run's continuation, in nats.
    log_kl : float
        ln(kl + 0.001), a mean over tokens as the others.
    """

    cosine: Cosine
    cosine_padded: Cosine
    attention_output: Cosine
    kl: Divergence
    agreement: Share
    loss: Divergence
    log_kl: Value


class Difference(Section):
    """A mean difference over samples, paired, with the ends of its 95 % interval where one can be given."""

    value: Value
    interval_95: IntervalOfValue | None = None


class Baseline(Section):
    """One method at the profile's size and window, and how it did.

    Attributes
    ----------
    overrides : tuple of LayerOverride
        What it has otherwise in some layers.
    difference : Difference, optional
        The tuned method's objective minus this one's, on the same samples; None for the full cache.
    """

    method: Annotated[MethodConfig | Full, Field(discriminator="name")]
    overrides: Overrides = ()
    metrics: Metrics
    difference: Difference | None = None


class Results(Section):
    """How the tuned method and others at its size and window did.

    Attributes
    ----------
    tuning : Score
        On the samples that the search saw.
    held_out : Score, optional
        On those that it did not see; None if there were none.
    metrics : Metrics
        The tuned method's, on the held-out samples or, without them, on the tuning samples.
    baselines : tuple of Baseline
        On the same samples as ``metrics``.
    """

    tuning: Score
    held_out: Score | None = None
    metrics: Metrics
    baselines: Annotated[tuple[Baseline, ...], Field(max_length=256)]

    @property
    def judged(self) -> Score:
        """The score on the held-out samples or, without them, on the tuning samples."""
        return self.held_out or self.tuning

    @field_validator("held_out")
    @classmethod
    def _of_one_objective(cls, held_out: Score | None, info: ValidationInfo) -> Score | None:
        tuning = info.data.get("tuning")
        if held_out and tuning and held_out.objective != tuning.objective:
            raise ValueError(f"its objective must be {tuning.objective}, as on the tuning samples")
        return held_out

    @field_validator("metrics")
    @classmethod
    def _hold_the_score(cls, metrics: Metrics, info: ValidationInfo) -> Metrics:
        # Either may be missing because it is invalid itself.
        judged = info.data.get("held_out") or info.data.get("tuning")
        if "held_out" in info.data and judged:
            value = metrics.model_dump().get(judged.objective, judged.value)
            # A sum in another order has other last digits.
            if not math.isclose(value, judged.value, rel_tol=1e-6, abs_tol=1e-6):
                raise ValueError(
                    f"{judged.objective} is {value}, and {judged.value} in the score of the same samples"
                )
        return metrics


class DroppedSample(Section):
    """A sample that could not be used, and why."""

    id: SampleId
    reason: Reason


class Search(Section):
    """How the parameters were searched.

    Attributes
    ----------
    storage : str, optional
        URL of the study, if it was not the default file; user, password and query are cut off.
    duration_s : float
        Seconds of the run that wrote the profile, capture included; a resumed one is shorter than the whole.
    space : dict of str to tuple
        Lowest and highest value, or the choices, of each parameter that was searched.
    decode_tokens : int
        Tokens generated per sample, at most.
    """

    sampler: Label
    trials: Count
    seed: Count
    study: Label
    storage: StorageUrl | None = None
    duration_s: Seconds
    objective: Label
    space: Annotated[dict[ParameterName, Range], Field(max_length=16)]
    decode_tokens: PositiveCount
    dropped_samples: Annotated[tuple[DroppedSample, ...], Field(max_length=8192)]


class Environment(Section):
    """What the tune ran on; versions as strings, ``created`` in UTC."""

    clusterprof: Label
    torch: Label
    transformers: Label
    python: Label
    attention_backend: Label
    dtype: Label
    device: Label
    created: UtcTime
