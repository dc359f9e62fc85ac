"""Judging: the tuned method against others at the same size, on prompts that the search did not see."""

from collections.abc import Mapping
from dataclasses import dataclass

from clusterprof.methods import METHODS, MethodConfig, default_method
from clusterprof.profile import Compression
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import ObjectiveName, Scores, mean_scores
from clusterprof.profiling.settings import TuneListener
from clusterprof.statistics import Estimate, paired_difference

_BASELINES = ("clusterattn", "snapkv", "topk", "streaming_llm")


@dataclass(frozen=True)
class MethodResult:
    """How a method did on the prompts it was judged on.

    Attributes
    ----------
    method : MethodConfig or None
        None for the full cache.
    scores : Scores
        Means over the prompts.
    behind : Estimate, optional
        The tuned method's objective minus this one's, prompt by prompt; not there for the tuned one itself and
        for the full cache.
    """

    label: str
    method: MethodConfig | None
    scores: Scores
    behind: Estimate | None = None


@dataclass(frozen=True)
class Judgement:
    """All methods on the same prompts, the tuned one first, its paper's default second, the full cache last.

    Attributes
    ----------
    tuned : tuple of Scores
        The tuned method's, by prompt.
    held_out : bool
        Whether the search had not seen the prompts.
    """

    methods: tuple[MethodResult, ...]
    tuned: tuple[Scores, ...]
    held_out: bool


def judge(
    evaluator: Evaluator,
    best: Compression,
    tuned_snapkv: MethodConfig | None,
    *,
    held_out: bool,
    objective: ObjectiveName,
    seed: int,
    listener: TuneListener,
) -> Judgement:
    """Score the tuned method and what it is compared with, at its size and window.

    Parameters
    ----------
    tuned_snapkv : MethodConfig, optional
        SnapKV as the same search found it.
    seed : int
        Of the intervals.
    """
    methods = _methods(best, tuned_snapkv)
    listener.comparing(len(methods))
    per_prompt: dict[str, list[Scores]] = {}
    for label, method in methods.items():
        per_prompt[label] = evaluator.scores(best.model_copy(update={"method": method}))
        listener.compared(label)
    tuned = per_prompt["tuned"]
    results = []
    for label, method in methods.items():
        mine, others = ([scores[objective] for scores in each] for each in (tuned, per_prompt[label]))
        behind = None if label == "tuned" else paired_difference(mine, others, seed=seed)
        results.append(MethodResult(label, method, mean_scores(per_prompt[label]), behind))
    results.append(MethodResult("full", None, mean_scores(evaluator.full_scores())))
    return Judgement(tuple(results), tuple(tuned), held_out)


def _methods(best: Compression, tuned_snapkv: MethodConfig | None) -> Mapping[str, MethodConfig]:
    name, size = best.method.name, best.size
    default = "paper default" if name == "clusterattn" else f"{METHODS[name].title} default"
    methods: dict[str, MethodConfig] = {"tuned": best.method, default: default_method(name, size)}
    for other in _BASELINES:
        if other != name:
            methods[METHODS[other].title] = default_method(other, size)
        if other == "snapkv" and tuned_snapkv is not None:
            methods["SnapKV tuned"] = tuned_snapkv
    return methods
