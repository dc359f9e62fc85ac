from typing import get_args

import pytest
from hypothesis import given, settings
from pydantic import TypeAdapter, ValidationError

from clusterprof.errors import ClusterprofError
from clusterprof.methods import (
    H2O,
    METHODS,
    ClusterAttn,
    Full,
    MethodConfig,
    StreamingLLM,
    default_method,
    method_names,
)
from tests.methods.strategies import methods

ADAPTER: TypeAdapter[MethodConfig] = TypeAdapter(MethodConfig)


def test_every_method_is_there_under_its_own_name() -> None:
    expected = ("clusterattn", "snapkv", "topk", "streaming_llm", "h2o", "kmeans", "dbscan", "ngram")
    assert method_names() == expected
    members, _ = get_args(MethodConfig)
    assert set(get_args(members)) == set(METHODS.values())
    for name in expected:
        assert default_method(name, 256).name == name


def test_every_method_has_a_title_of_its_own() -> None:
    titles = {"ClusterAttn", "SnapKV", "top-k", "StreamingLLM", "H2O", "K-means", "DBSCAN", "n-gram"}
    assert {method.title for method in METHODS.values()} == titles


def test_clusterattn_has_the_theta_of_its_size() -> None:
    assert default_method("clusterattn", 4096) == ClusterAttn(num_block=8, theta=8e-4)


def test_two_methods_evict_while_decoding_where_asked() -> None:
    assert default_method("h2o", 256) == H2O()
    assert default_method("h2o", 256, evict_while_decoding=True) == H2O(evict_while_decoding=True)
    expected = StreamingLLM(evict_while_decoding=True)
    assert default_method("streaming_llm", 256, evict_while_decoding=True) == expected


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"h2o", "streaming_llm"}))
def test_the_others_say_which_do(name: str) -> None:
    with pytest.raises(ClusterprofError, match=f"^{name} .* the methods that do are streaming_llm and h2o"):
        default_method(name, 256, evict_while_decoding=True)


@settings(max_examples=200, deadline=None)
@given(method=methods())
def test_a_method_survives_json(method: MethodConfig) -> None:
    assert ADAPTER.validate_json(ADAPTER.dump_json(method)) == method


def test_the_full_cache_is_not_one_to_compress_with() -> None:
    assert Full().name == "full"
    with pytest.raises(ValidationError, match="full"):
        ADAPTER.validate_python({"name": "full"})
