import json
import re
from pathlib import Path
from typing import Any

import pytest

from clusterprof import Profile
from clusterprof.methods import ClusterAttn
from clusterprof.profile import Compression, LayerOverride
from tests.profile.examples import Document, changed, document, refusal

VALUES = {
    "name": "clusterattn",
    "num_block": 3,
    "theta": 0.25,
    "gap_pool": 15,
    "gap_pooling": "avg",
    "importance": "mean",
}
OVERRIDES = [{"layers": [0], "method": VALUES}, {"layers": [1, 5], "method": {**VALUES, "gap_pool": 3}}]


def written(tmp_path: Path, content: Document) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def with_overrides() -> Document:
    content = changed("compression.overrides", OVERRIDES)
    content["model"]["num_hidden_layers"] = 7
    return content


def test_overrides_read_back_as_they_were_written(tmp_path: Path) -> None:
    content = with_overrides()
    content["results"]["baselines"].insert(0, {**content["results"]["baselines"][0], "method": VALUES})
    content["results"]["baselines"][0]["overrides"] = OVERRIDES[:1]
    profile = Profile.load(written(tmp_path, content))
    first, second = profile.compression.overrides
    assert first == LayerOverride(layers=(0,), method=ClusterAttn(num_block=3, theta=0.25))
    assert second.layers == (1, 5)
    profile.save(tmp_path / "copy.json")
    assert json.loads((tmp_path / "copy.json").read_text("utf-8")) == content


def test_a_layer_has_its_own_method_and_the_others_the_profiles(tmp_path: Path) -> None:
    profile = Profile.load(written(tmp_path, with_overrides()))
    compression = profile.compression
    blocks = [compression.method_of(layer).model_dump()["num_block"] for layer in range(7)]
    assert blocks == [3, 3, 8, 8, 8, 3, 8]


def test_what_has_no_overrides_says_nothing_of_them(tmp_path: Path) -> None:
    profile = Profile.load(written(tmp_path, document()))
    assert profile.compression.overrides == ()
    assert "overrides" not in profile.model_dump_json()
    assert Profile.load(written(tmp_path, changed("compression.overrides", []))) == profile


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([{"layers": [0], "method": {"name": "topk"}}], "all layers must have the method clusterattn"),
        ([{"layers": [], "method": VALUES}], "overrides.0.layers: .*at least 1"),
        ([{"layers": [1, 0], "method": VALUES}], "overrides.0.layers: layers must be ascending"),
        ([{"layers": [1, 1], "method": VALUES}], "overrides.0.layers: layers must be ascending"),
        ([{"layers": [-1], "method": VALUES}], "overrides.0.layers.0: .*greater than or equal to 0"),
        ([OVERRIDES[0], OVERRIDES[0]], "a layer must not be in two of them"),
        ([{"layers": [0], "method": {**VALUES, "theta": 2}}], "theta"),
        ([{"layers": [0]}], "overrides.0.method: field required"),
        ([{"layers": [0], "method": VALUES, "size": 64}], "overrides.0.size"),
        ({"0": VALUES}, "overrides: "),
    ],
)
def test_overrides_that_mean_nothing_are_refused(tmp_path: Path, overrides: Any, problem: str) -> None:
    message = refusal(written(tmp_path, changed("compression.overrides", overrides)))
    assert re.search(problem, message), message


def test_all_layers_evict_while_decoding_or_none(tmp_path: Path) -> None:
    content = changed("compression.method", {"name": "h2o"})
    method = {"name": "h2o", "evict_while_decoding": True}
    content["compression"]["overrides"] = [{"layers": [0], "method": method}]
    assert "evict_while_decoding must be the same in all layers" in refusal(written(tmp_path, content))


def test_an_invalid_method_is_told_once(tmp_path: Path) -> None:
    content = changed("compression.overrides", OVERRIDES)
    content["compression"]["method"]["num_block"] = 0
    message = refusal(written(tmp_path, content))
    assert "num_block" in message
    assert "more" not in message


@pytest.mark.parametrize(
    ("layers", "where"),
    [((4,), "layer 4"), ((4, 5, 6), "layers 4 to 6"), ((4, 6, 7), "layers 4, 6, 7")],
)
def test_where_an_override_is_and_what_it_changes(layers: tuple[int, ...], where: str) -> None:
    override = LayerOverride(layers=layers, method=ClusterAttn(num_block=3, theta=0.25))
    assert override.where == where
    assert override.changes(ClusterAttn(num_block=8, theta=0.25)) == {"num_block": 3}


def test_a_compression_with_overrides_can_be_a_key() -> None:
    override = LayerOverride(layers=(0,), method=ClusterAttn(num_block=3, theta=0.25))
    plain = Compression(size=64, window=8, method=ClusterAttn(num_block=8, theta=0.25))
    mixed = plain.model_copy(update={"overrides": (override,)})
    assert len({plain, mixed, plain.model_copy()}) == 2
