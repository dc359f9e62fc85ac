"""The profile itself: its sections in one file that loads, saves and knows its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import field_validator

from clusterprof.errors import ProfileError
from clusterprof.profile import files, match
from clusterprof.profile.compression import Compression, Overrides
from clusterprof.profile.fields import SchemaVersion
from clusterprof.profile.section import Section
from clusterprof.profile.sections import (
    DatasetRecord,
    Environment,
    ModelIdentity,
    Results,
    Search,
)

if TYPE_CHECKING:
    from pydantic import ValidationInfo
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def _check_layers(overrides: Overrides, info: ValidationInfo) -> None:
    model: ModelIdentity | None = info.data.get("model")
    last = max((layer for override in overrides for layer in override.layers), default=0)
    if model and last >= model.num_hidden_layers:
        raise ValueError(
            f"an override is for layer {last}, and the last layer is {model.num_hidden_layers - 1}"
        )


class Profile(Section):
    """The result of one tune: one model, one workload, one size."""

    schema_version: SchemaVersion
    model: ModelIdentity
    dataset: DatasetRecord
    compression: Compression
    results: Results
    search: Search
    environment: Environment

    @field_validator("compression")
    @classmethod
    def _of_the_layers(cls, compression: Compression, info: ValidationInfo) -> Compression:
        _check_layers(compression.overrides, info)
        return compression

    @field_validator("results")
    @classmethod
    def _with_the_default(cls, results: Results, info: ValidationInfo) -> Results:
        for baseline in results.baselines:
            _check_layers(baseline.overrides, info)
        compression = info.data.get("compression")
        if compression and compression.method.name not in {it.method.name for it in results.baselines}:
            raise ValueError(f"the baselines must have {compression.method.name} with its paper's values")
        return results

    @field_validator("results")
    @classmethod
    def _on_its_samples(cls, results: Results, info: ValidationInfo) -> Results:
        dataset: DatasetRecord | None = info.data.get("dataset")
        if dataset is None:
            return results
        for which, score, ids in (
            ("tuned on", results.tuning, dataset.sampled_ids),
            ("held out", results.held_out, dataset.held_out_ids),
        ):
            if score and score.samples > len(ids):
                raise ValueError(f"a score is of {score.samples} samples that were {which}, of {len(ids)}")
        return results

    @field_validator("search")
    @classmethod
    def _of_the_objective(cls, search: Search, info: ValidationInfo) -> Search:
        results = info.data.get("results")
        if results and search.objective != results.tuning.objective:
            raise ValueError(f"its objective must be {results.tuning.objective}, as in the results")
        return search

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile and check every field.

        Parameters
        ----------
        path : str or Path
            JSON, UTF-8 (a byte-order mark is accepted), at most 1 MiB.

        Raises
        ------
        ProfileError
            If there is no such file, or it is not a valid profile; names the file, the field and what is
            wrong with it.
        """
        return files.read(cls, Path(path))

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, creating folders on the way.

        The file is replaced as a whole: whatever interrupts the write, the old file or the new one is there.

        Raises
        ------
        ProfileError
            If the file cannot be written; nothing is left behind then.
        """
        files.write(self, Path(path))

    def mismatches(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> list[str]:
        """List what differs between the profile's model and this one.

        Compared are the model's name (last part of its id, so that a folder with a copy matches; letter case
        does not count), architecture, layers, heads, KV heads, head_dim and RoPE settings; with a tokenizer
        also the tokenizer and chat template. The revision is not compared: most commits to a model's
        repository leave the weights as they are.

        Returns
        -------
        list of str
            One entry ``"field: profile X, model Y"`` per difference; empty if the profile fits.
        """
        return match.differences(self.model, model, tokenizer)

    def check(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        otherwise: str = "",
    ) -> None:
        """Refuse a model that the profile was not made for.

        Parameters
        ----------
        model, tokenizer
            As for :meth:`mismatches`.
        otherwise : str
            What else there is to do where the profile can be used all the same, for the message.

        Raises
        ------
        ProfileError
            If :meth:`mismatches` finds any difference; names them all.
        """
        found = self.mismatches(model, tokenizer)
        if found:
            raise ProfileError(
                f"The profile was made for another model ({'; '.join(found)}); tune one for this model{otherwise}."
            )
