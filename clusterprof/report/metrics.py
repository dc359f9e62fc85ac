"""Metrics as people read them: names, digits, and which direction is better."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A score and how it is written.

    Attributes
    ----------
    name : str
        In ``Record.scores``.
    title : str
        What it is, in a few words.
    digits : int
        After the point.
    better : str
        "higher", "lower", or "neither" of what only describes.
    """

    name: str
    title: str
    digits: int = 3
    better: Literal["higher", "lower", "neither"] = "higher"

    @property
    def heading(self) -> str:
        """Return the name with an arrow in the better direction, if there is one."""
        return f"{self.name} {_ARROWS[self.better]}".rstrip()

    @property
    def direction(self) -> str:
        """Return the same in words."""
        return f"{self.better} is better"

    def text(self, value: float) -> str:
        """Return a value with the metric's digits."""
        return self._written(value, "")

    def signed(self, value: float) -> str:
        """Return a difference, with its sign."""
        return self._written(value, "+")

    def _written(self, value: float, sign: str) -> str:
        # Adding 0 makes a positive one of a negative one, which rounding leaves.
        rounded = round(value, self.digits) + 0.0
        return f"{rounded:{sign}.{self.digits}f}".replace("-", "\N{MINUS SIGN}")


_ARROWS = {"higher": "↑", "lower": "↓", "neither": ""}
_METRICS = (
    Metric("accuracy", "share of right answers"),
    Metric("rouge1", "ROUGE-1, words shared with the needle"),
    Metric("score", "LongBench score, 0 to 100", digits=1),
    Metric("loss", "loss after the first token, nats per token", better="lower"),
    Metric("perplexity", "perplexity of the reference answer", digits=2, better="lower"),
    Metric("hit_rate", "hit rate"),
    Metric("window_share", "share of the prompt that the window marks", better="neither"),
    Metric("kl", "KL divergence of the next token's distribution", digits=4, better="lower"),
    Metric("log_kl", "logarithm of the next token's KL divergence, mean over tokens", better="lower"),
    Metric("agreement", "share of steps with the same next token"),
    Metric("cosine", "cosine similarity of attention, at the kept positions", digits=4),
    Metric("cosine_padded", "cosine similarity of attention, at all positions", digits=4),
    Metric("attention_output", "cosine similarity of the attention's output", digits=4),
)
_BY_NAME = {metric.name: metric for metric in _METRICS}


def metric_of(name: str) -> Metric:
    """Return how a score is written; one that is not known is written plainly."""
    return _BY_NAME.get(name, Metric(name, name))
