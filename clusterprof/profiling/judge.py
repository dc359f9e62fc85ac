"""Judging: the tuned method against others at the same size, on prompts that the search did not see."""

from collections.abc import Mapping
from dataclasses import dataclass

from clusterprof.methods import METHODS, MethodConfig, default_method
from clusterprof.profile import Compression, LayerOverride
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import ObjectiveName, Scores, is_better, mean_scores
from clusterprof.profiling.settings import TuneListener
from clusterprof.statistics import Estimate, paired_difference

# The tuned method, where it is in the table twice.
UNIFORM, PER_LAYER = "tuned uniformly", "tuned per layer"
TUNED_SNAPKV = "SnapKV tuned"
_BASELINES = ("clusterattn", "snapkv", "topk", "streaming_llm")


@dataclass(frozen=True)
class MethodResult:
    """How a method did on the prompts it was judged on.

    Attributes
    ----------
    method : MethodConfig or None
        None for the full cache.
    per_prompt : tuple of Scores
        One for each prompt.
    behind : Estimate, optional
        The tuned method's objective minus this one's, prompt by prompt; not there for the tuned one itself and
        for the full cache.
    overrides : tuple of LayerOverride
        What the method has otherwise in some layers.
    """

    label: str
    method: MethodConfig | None
    per_prompt: tuple[Scores, ...]
    behind: Estimate | None = None
    overrides: tuple[LayerOverride, ...] = ()

    @property
    def scores(self) -> Scores:
        """Means over the prompts."""
        return mean_scores(self.per_prompt)


@dataclass(frozen=True)
class Judgement:
    """All methods on the same prompts, the tuned one first, its paper's default second, the full cache last.

    Attributes
    ----------
    held_out : bool
        Whether the search had not seen the prompts.
    """

    methods: tuple[MethodResult, ...]
    held_out: bool

    @property
    def tuned(self) -> tuple[Scores, ...]:
        """The tuned method's, by prompt."""
        return self.methods[0].per_prompt


def judge(
    evaluator: Evaluator,
    best: Compression,
    tuned_snapkv: MethodConfig | None,
    per_layer: Compression | None = None,
    *,
    held_out: bool,
    objective: ObjectiveName,
    seed: int,
    listener: TuneListener,
) -> Judgement:
    """Score the tuned method and what it is compared with, at its size and window.

    Parameters
    ----------
    best : Compression
        What the search found, the same in all layers.
    tuned_snapkv : MethodConfig, optional
        SnapKV as the same search found it.
    per_layer : Compression, optional
        What was found with overrides; it is the tuned one if the prompts show it to be better than ``best``.
    seed : int
        Of the intervals.
    """
    compared = _compared(best, tuned_snapkv, per_layer)
    listener.comparing(len(compared))
    per_prompt: dict[str, list[Scores]] = {}
    for label, compression in compared.items():
        per_prompt[label] = evaluator.scores(compression)
        listener.compared(label)
    tuned, default = list(compared)[:2]

    def difference(label: str, other: str) -> Estimate:
        mine, others = ([scores[objective] for scores in per_prompt[it]] for it in (label, other))
        return paired_difference(mine, others, seed=seed)

    if per_layer is not None:
        gain = difference(PER_LAYER, UNIFORM)
        if gain.excludes_zero and is_better(gain.mean, 0.0, objective):
            tuned = PER_LAYER
    results = []
    for label in dict.fromkeys((tuned, default, *compared)):
        behind = None if label == tuned else difference(tuned, label)
        method, overrides = compared[label].method, compared[label].overrides
        results.append(MethodResult(label, method, tuple(per_prompt[label]), behind, overrides))
    results.append(MethodResult("full", None, tuple(evaluator.full_scores())))
    return Judgement(tuple(results), held_out)


def _compared(
    best: Compression, tuned_snapkv: MethodConfig | None, per_layer: Compression | None
) -> Mapping[str, Compression]:
    methods = _methods(best, tuned_snapkv)
    compared = {label: best.uniform(method) for label, method in methods.items()}
    if per_layer is None:
        return compared
    return {UNIFORM: compared.pop("tuned"), **compared, PER_LAYER: per_layer}


def _methods(best: Compression, tuned_snapkv: MethodConfig | None) -> Mapping[str, MethodConfig]:
    name, size = best.method.name, best.size
    default = "paper default" if name == "clusterattn" else f"{METHODS[name].title} default"
    methods: dict[str, MethodConfig] = {"tuned": best.method, default: default_method(name, size)}
    for other in _BASELINES:
        if other != name:
            methods[METHODS[other].title] = default_method(other, size)
        if other == "snapkv" and tuned_snapkv is not None:
            methods[TUNED_SNAPKV] = tuned_snapkv
    return methods
