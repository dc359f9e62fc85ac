"""The profile: what a tune found, for which model and data, in one checked file."""

from clusterprof.methods import Full
from clusterprof.profile.compression import Compression, LayerOverride
from clusterprof.profile.document import Profile
from clusterprof.profile.fields import Range, Window
from clusterprof.profile.files import MAX_BYTES, first_problem
from clusterprof.profile.location import profile_path
from clusterprof.profile.sections import (
    Baseline,
    DatasetRecord,
    Difference,
    DroppedSample,
    Environment,
    Metrics,
    ModelIdentity,
    Results,
    Score,
    Search,
)

__all__ = [
    "MAX_BYTES",
    "Baseline",
    "Compression",
    "DatasetRecord",
    "Difference",
    "DroppedSample",
    "Environment",
    "Full",
    "LayerOverride",
    "Metrics",
    "ModelIdentity",
    "Profile",
    "Range",
    "Results",
    "Score",
    "Search",
    "Window",
    "first_problem",
    "profile_path",
]
