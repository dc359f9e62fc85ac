"""The base of a profile's sections."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every section: unknown fields, other types and NaN are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
