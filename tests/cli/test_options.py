from typing import get_args

from clusterprof.cli import _options as opt
from clusterprof.models.choices import ATTENTIONS, DTYPES
from clusterprof.profiling.objective import DIRECTIONS


def test_choices_are_those_of_the_library() -> None:
    # Written out there, as importing them would cost every start of the command line.
    assert get_args(get_args(opt.Dtype)[0]) == DTYPES
    assert get_args(get_args(opt.Attention)[0]) == ATTENTIONS
    assert get_args(get_args(opt.Objective)[0]) == tuple(DIRECTIONS)
