"""Search spaces: where a tune looks for the parameters of each method."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from clusterprof.methods import ClusterAttn, MethodConfig, SnapKV, StreamingLLM, default_method
from clusterprof.profile import Compression, Range, Window
from clusterprof.profiling.capture import Capture
from clusterprof.profiling.objective import OF_ATTENTION, ObjectiveName

Point = dict[str, Any]
Distributions = Mapping[str, BaseDistribution]

# Tokens that importance is pooled over.
_POOL = IntDistribution(1, 63, step=2)
_POOLING = CategoricalDistribution(["avg", "max"])
_REDUCTION = CategoricalDistribution(["mean", "max"])
# Whether to evict while decoding is not here: a replay keeps all decoded tokens, so it cannot tell.
_FIXED: Mapping[str, Distributions] = {
    "snapkv": {
        "kernel_size": _POOL,
        "pooling": _POOLING,
        "importance": _REDUCTION,
    },
    "topk": {},
    "h2o": {"recent_share": FloatDistribution(0.1, 0.9)},
    "kmeans": {"clusters": IntDistribution(2, 128, log=True)},
    "dbscan": {"eps": FloatDistribution(1e-3, 0.2, log=True), "min_samples": IntDistribution(1, 20)},
    "ngram": {"n": IntDistribution(1, 4)},
}
_NUM_BLOCK = IntDistribution(1, 32)
_MOST_INITIAL_TOKENS = 64


@dataclass(frozen=True)
class SearchSpace:
    """Where to look: one method at one size and window.

    Attributes
    ----------
    default : MethodConfig
        The paper's values, tried first; what is not searched stays as it is here.
    distributions : mapping of str to BaseDistribution
        By name of the parameter; empty for a method that has none.
    """

    default: MethodConfig
    size: int
    window: Window
    distributions: Distributions

    @property
    def first(self) -> Point:
        """The default's point."""
        return {name: getattr(self.default, name) for name in self.distributions}

    def like(self, other: MethodConfig) -> Point | None:
        """The point that chooses as another method does, if there is one: a good place to begin at."""
        if not (isinstance(self.default, ClusterAttn) and isinstance(other, SnapKV)):
            return None
        # Above every centre a head is one gap, and that is filled as SnapKV does it.
        theta = self.distributions["theta"]
        assert isinstance(theta, FloatDistribution)
        point = {
            "theta": theta.high,
            "gap_pool": other.kernel_size,
            "gap_pooling": other.pooling,
            "importance": other.importance,
        }
        return {**self.first, **{name: value for name, value in point.items() if name in self.distributions}}

    def compression(self, point: Mapping[str, Any]) -> Compression:
        """The candidate at a point."""
        method = type(self.default)(**{**self.default.model_dump(), **point})
        return Compression(size=self.size, window=self.window, method=method)

    def points(self) -> list[Point] | None:
        """All points, neighbours beside each other, or None where a parameter is continuous."""
        axes = list(map(_values, self.distributions.values()))
        finite = [axis for axis in axes if axis is not None]
        return self._product(finite) if len(finite) == len(axes) else None

    def grid(self, most: int) -> list[Point]:
        """Points at even distances, at most ``most`` if a grid can be that small; as fine along each parameter."""
        steps = dict.fromkeys(self.distributions, 1)
        axes = {name: _spread(each, 1) for name, each in self.distributions.items()}
        refined = True
        while refined:
            refined = False
            for name, distribution in self.distributions.items():
                finer = {**axes, name: _spread(distribution, steps[name] + 1)}
                if len(finer[name]) > len(axes[name]) and math.prod(map(len, finer.values())) <= most:
                    steps[name] += 1
                    axes, refined = finer, True
        return self._product(axes.values())

    def _product(self, axes: Iterable[Sequence[Any]]) -> list[Point]:
        return [dict(zip(self.distributions, point, strict=True)) for point in itertools.product(*axes)]

    def ranges(self) -> dict[str, Range]:
        """Ends or choices of each parameter, as a profile holds them."""
        return {name: _range(distribution) for name, distribution in self.distributions.items()}


def search_space(
    name: str, captures: Sequence[Capture], size: int, window: Window, objective: ObjectiveName
) -> SearchSpace:
    """The space of a method on these captures; the paper's default is always in it.

    Parameters
    ----------
    name : str
        One of :func:`clusterprof.methods.method_names`.
    captures : sequence of Capture
        Of the tuning prompts; each with its own window, where that is the prompt's question.
    size : int
        Prompt tokens kept per KV head, the window included.
    window : int or "query"
        The observation window that was asked for.
    objective : str
        What the search optimises; one that compares attention cannot choose how importance is reduced.
    """
    if name == "clusterattn":
        theta = FloatDistribution(*theta_range(captures, size), log=True)
        distributions: Distributions = {
            "num_block": _NUM_BLOCK,
            "theta": theta,
            "gap_pool": _POOL,
            "gap_pooling": _POOLING,
            "importance": _REDUCTION,
        }
    elif name == "streaming_llm":
        distributions = {"initial_tokens": IntDistribution(0, _most_initial_tokens(captures, size))}
    else:
        distributions = _FIXED[name]
    if objective in OF_ATTENTION:
        # Measured by benchmarks/objective.py: they prefer a maximum that keeps single tokens, and lose answers by it.
        distributions = {key: value for key, value in distributions.items() if key != "importance"}
    return SearchSpace(default_method(name, size), size, window, distributions)


def theta_range(captures: Sequence[Capture], size: int) -> tuple[float, float]:
    """Range of theta in which ClusterAttn clusters and filters on these captures, the paper's default included.

    Centres are the peaks of blocks. Below the low end, nearly all of them survive: nothing is filtered. At the high
    end no head has a centre left; each is one gap. Ends are rounded outwards to one digit, so that they do not depend
    on the last bits of the captures. The low end is that of mean importance, the high end that of the highest, so
    that both are in the range.
    """
    default = ClusterAttn.paper_default(size)
    peaks, high = [], default.theta
    for capture in captures:
        block = max(1, (size - capture.window) // default.num_block)
        mean, peak = (capture.observation.reduced(how) for how in ("mean", "max"))
        peaks.append(torch.nn.functional.max_pool1d(mean, block, ceil_mode=True).flatten())
        # A centre of theta's importance survives.
        high = max(high, math.nextafter(float(peak.max()), math.inf))
    # torch's quantile takes no more than 16 million numbers, and many long prompts have more.
    low = float(np.quantile(torch.cat(peaks).double().numpy(), 0.05))
    return _rounded(min(max(low, 1e-7), default.theta), math.floor), _rounded(min(high, 1.0), math.ceil)


def _rounded(value: float, direction: Callable[[float], int]) -> float:
    digit = 10.0 ** math.floor(math.log10(value))
    return float(f"{direction(value / digit) * digit:.1e}")


def _most_initial_tokens(captures: Sequence[Capture], size: int) -> int:
    """As many as leave one token of the smallest budget to the recent ones, but not fewer than the default."""
    budget = size - max(capture.window for capture in captures)
    return min(_MOST_INITIAL_TOKENS, max(StreamingLLM().initial_tokens, budget - 1))


def _values(distribution: BaseDistribution) -> Sequence[Any] | None:
    """All values, or None if there are infinitely many."""
    if isinstance(distribution, IntDistribution):
        return range(distribution.low, distribution.high + 1, distribution.step)
    return distribution.choices if isinstance(distribution, CategoricalDistribution) else None


def _spread(distribution: BaseDistribution, count: int) -> Sequence[Any]:
    """So many values at even distances, both ends among them; fewer of integers, and all of what has no order."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    space = np.geomspace if distribution.log else np.linspace
    values = (
        space(distribution.low, distribution.high, count + 2)[1:-1]
        if count == 1
        else space(distribution.low, distribution.high, count)
    )
    if isinstance(distribution, FloatDistribution):
        return [float(value) for value in values.clip(distribution.low, distribution.high)]
    low, step = distribution.low, distribution.step
    return sorted({low + step * round((value - low) / step) for value in values.tolist()})


def _range(distribution: BaseDistribution) -> Range:
    if isinstance(distribution, CategoricalDistribution):
        return tuple(str(choice) for choice in distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return (distribution.low, distribution.high)
