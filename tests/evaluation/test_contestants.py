from pathlib import Path
from typing import Any

import pytest

from clusterprof.errors import ClusterprofError, ProfileError
from clusterprof.evaluation.contestants import contestants, tuned_rivals
from clusterprof.evaluation.records import Record
from clusterprof.methods import H2O, ClusterAttn, MethodConfig, SnapKV, StreamingLLM, TopK, method_names
from clusterprof.profile import Baseline, Compression, LayerOverride
from tests.evaluation.examples import record
from tests.profile.examples import profile


def saved(path: Path, **changes: Any) -> Path:
    """A profile of ClusterAttn at size 256, on needle."""
    found = profile()
    changes = {name: getattr(found, name).model_copy(update=new) for name, new in changes.items()}
    found.model_copy(update=changes).save(path)
    return path


def with_rivals(path: Path, *rivals: MethodConfig, method: MethodConfig | None = None) -> str:
    """A profile that holds other methods beside its own."""
    found = profile()
    metrics = found.results.baselines[0].metrics
    baselines = tuple(Baseline(method=rival, metrics=metrics) for rival in rivals)
    results = {"baselines": (*found.results.baselines, *baselines)}
    compression = {} if method is None else {"method": method}
    return str(saved(path, results=results, compression=compression))


def test_methods_by_name_have_their_papers_values() -> None:
    found = contestants([*method_names()])
    assert [it.label for it in found] == ["full", *method_names()]
    assert found[0].at_size is None
    assert {it.origin for it in found[1:]} == {"its paper's values"}
    assert {it.size for it in found} == {it.window for it in found} == {None}
    # The paper's theta depends on the size.
    assert [found[1].compression(size, 32).method for size in (1024, 2048)] == [
        ClusterAttn(num_block=8, theta=2e-3),
        ClusterAttn(num_block=8, theta=1e-3),
    ]
    assert found[2].compression(64, "query") == Compression(size=64, window="query", method=SnapKV())


@pytest.mark.parametrize("names", [[], ["full"]])
def test_the_full_cache_is_always_there_and_once(names: list[str]) -> None:
    assert [it.label for it in contestants(names)] == ["full"]


def test_the_full_cache_comes_first_wherever_it_is_named() -> None:
    assert [it.label for it in contestants(["topk", "full", "snapkv"])] == ["full", "topk", "snapkv"]


def test_eviction_while_decoding_by_name() -> None:
    _, h2o, whole, streaming = contestants(["h2o+decode", "h2o", "streaming_llm+decode"])
    assert [it.label for it in (h2o, whole, streaming)] == ["h2o+decode", "h2o", "streaming_llm+decode"]
    assert h2o.compression(64, 8).method == H2O(evict_while_decoding=True)
    assert whole.compression(64, 8).method == H2O()
    assert streaming.compression(64, 8).method == StreamingLLM(evict_while_decoding=True)


def test_a_profile_brings_its_values_window_and_size(tmp_path: Path) -> None:
    path = saved(tmp_path / "needle-256.json")
    _, tuned = contestants([str(path)])
    assert tuned.label == "clusterattn (needle-256)"
    assert tuned.origin == "profile needle-256.json, tuned on needle"
    assert tuned.profile == profile()
    assert (tuned.size, tuned.window) == (256, 32)
    assert tuned.compression(256, 8) == profile().compression


def test_what_a_tune_found_of_another_method_takes_part_beside_its_profile(tmp_path: Path) -> None:
    tuned = SnapKV(kernel_size=29, pooling="max")
    path = with_rivals(
        tmp_path / "needle-256.json", SnapKV(), tuned, TopK(), ClusterAttn(num_block=3, theta=0.5)
    )
    entered = contestants(["snapkv", path])
    (rival,) = tuned_rivals(entered)
    assert rival.label == "snapkv (beside needle-256)"
    assert rival.origin == "found by the tune of profile needle-256.json, tuned on needle"
    assert rival.compression(256, 8) == Compression(size=256, window=32, method=tuned)
    assert (rival.size, rival.window, rival.profile) == (256, 32, None)
    # Once, however many profiles hold it, and not beside a profile of its own.
    again = with_rivals(tmp_path / "again.json", tuned)
    assert [it.label for it in tuned_rivals(contestants([path, again]))] == [rival.label]
    own = with_rivals(tmp_path / "own.json", SnapKV(), method=tuned)
    assert tuned_rivals(contestants([path, own])) == []
    assert tuned_rivals(contestants(["snapkv", "topk"])) == []


def test_a_profile_brings_its_overrides(tmp_path: Path) -> None:
    override = LayerOverride(layers=(1,), method=ClusterAttn(num_block=3, theta=0.25))
    path = saved(tmp_path / "mine.json", compression={"overrides": (override,)})
    _, tuned = contestants([str(path)])
    assert tuned.compression(256, 8).overrides == (override,)


def test_a_profile_in_this_folder_is_known_by_its_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "mine.json")
    monkeypatch.chdir(tmp_path)
    assert contestants(["mine.json"])[1].label == contestants(["./mine.json"])[1].label


def test_contestants_can_be_keys(tmp_path: Path) -> None:
    found = contestants(["topk", str(saved(tmp_path / "mine.json"))])
    assert len(dict.fromkeys([*found, *found])) == 3


def test_a_record_can_hold_any_profiles_name(tmp_path: Path) -> None:
    names = ["x" * 250, "two\nlines\x1b[2J", "ünï漢字", "half\udcff"]
    for name in names:
        path = saved(tmp_path / f"{name}.json", dataset={"name": "/folder" * 140})
        (_, tuned) = contestants([str(path)])
        made = record(
            method=tuned.label, origin=tuned.origin, parameters=profile().compression.method.model_dump()
        )
        assert Record.model_validate_json(made.model_dump_json()) == made
        (rival,) = tuned_rivals(contestants([with_rivals(Path(path), SnapKV(kernel_size=9))]))
        assert record(method=rival.label, origin=rival.origin).method == rival.label


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["magic"], "no method 'magic'; the methods are clusterattn, snapkv, .*, ngram"),
        (["SnapKV"], "no method 'SnapKV'"),
        ([""], "no method ''"),
        (["+decode"], "no method '\\+decode'"),
        (["full+decode"], "no method 'full\\+decode'"),
        (["topk", "snapkv", "topk"], "topk takes part twice"),
    ],
)
def test_names_that_mean_nothing_are_refused(names: list[str], problem: str) -> None:
    with pytest.raises(ClusterprofError, match=problem):
        contestants(names)


def test_a_method_that_cannot_evict_while_decoding_is_refused() -> None:
    with pytest.raises(ClusterprofError, match="snapkv compresses prompts only"):
        contestants(["snapkv+decode"])[1].compression(64, 8)


def test_a_profile_that_comes_twice_is_refused(tmp_path: Path) -> None:
    path = str(saved(tmp_path / "mine.json"))
    with pytest.raises(ClusterprofError, match=r"clusterattn \(mine\) takes part twice"):
        contestants([path, path])


@pytest.mark.parametrize("name", ["nowhere.json", "no/where"])
def test_a_profile_that_cannot_be_read_is_named(name: str) -> None:
    with pytest.raises(ProfileError, match=f"no profile {name}"):
        contestants([name])


def test_profiles_of_the_same_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    paths = [str(saved(tmp_path / name)) for name in ("one/mine.json", "two/mine.json", "other.json")]
    labels = [it.label for it in contestants(paths)[1:]]
    assert labels == ["clusterattn (one/mine)", "clusterattn (two/mine)", "clusterattn (other)"]
    with pytest.raises(ClusterprofError, match="takes part twice"):
        contestants([paths[0], paths[0]])


def test_profiles_are_told_apart_by_as_many_folders_as_it_takes(tmp_path: Path) -> None:
    names = ("old/model/mine.json", "new/model/mine.json", "new/other/mine.json")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
    labels = [it.label for it in contestants([str(saved(tmp_path / name)) for name in names])[1:]]
    assert labels == [
        "clusterattn (old/model/mine)",
        "clusterattn (new/model/mine)",
        "clusterattn (other/mine)",
    ]


@pytest.mark.parametrize("names", [["n" * 150 + "1", "n" * 150 + "2"], ["1" + "n" * 150, "2" + "n" * 150]])
def test_profiles_with_long_names_are_told_apart_at_either_end(tmp_path: Path, names: list[str]) -> None:
    labels = [it.label for it in contestants([str(saved(tmp_path / f"{name}.json")) for name in names])[1:]]
    assert len(set(labels)) == 2
    assert all(len(label) < 100 for label in labels)
