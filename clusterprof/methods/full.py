"""The full cache: nothing is evicted."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Full(BaseModel):
    """The full cache, as the baseline of comparisons; it has no size, so it chooses nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["full"] = "full"
