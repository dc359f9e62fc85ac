import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterprof import Profile
from clusterprof.methods import ClusterAttn, SnapKV, StreamingLLM, TopK
from tests.profile.examples import Document, document, profile

finite = st.floats(allow_nan=False, allow_infinity=False)
share = st.floats(0, 1)
count = st.integers(0, 2**53)
positive = st.integers(1, 2**53)
value = st.floats(-1e6, 1e6)
# Without what a terminal would obey: control characters, line breaks and changes of direction.
character = st.characters(
    exclude_categories=["Cc", "Cs", "Zl", "Zp"],
    exclude_characters="\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
)
label = st.text(character, min_size=1, max_size=1000)
sample_id = st.text(character, min_size=1, max_size=20)
json_value: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | finite | st.integers(-(2**70), 2**70) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
parameter = st.from_regex(r"[a-z][a-z0-9_]{0,63}", fullmatch=True)
searched: st.SearchStrategy[Any] = st.one_of(
    st.lists(count, min_size=2, max_size=2).map(sorted),
    st.lists(value, min_size=2, max_size=2).map(sorted),
    st.lists(sample_id, min_size=1, max_size=4),
)
method = st.one_of(
    st.builds(ClusterAttn, num_block=st.integers(1, 64), theta=share, gap_pool=st.sampled_from([1, 3, 15])),
    st.builds(SnapKV, kernel_size=st.sampled_from([1, 5, 15])),
    st.builds(StreamingLLM),
    st.builds(TopK),
)


@st.composite
def documents(draw: st.DrawFn) -> Document:
    result = document()
    result["model"] |= {"id": draw(label), "revision": draw(st.none() | label)}
    result["model"]["rope"] = draw(st.dictionaries(st.text(max_size=5), json_value, max_size=3))
    result["dataset"] |= {
        "sampled_ids": (sampled := draw(st.lists(sample_id, min_size=2, max_size=3))),
        "held_out_ids": (
            others := draw(st.lists(sample_id.filter(lambda it: it not in sampled), max_size=3))
        ),
        "fraction": draw(st.floats(0, 1, exclude_min=True)),
        "seed": draw(count),
        "tokens": draw(st.none() | positive),
    }
    window, more = draw(st.tuples(st.integers(1, 2**20), st.integers(1, 2**20)))
    parameters = draw(method).model_dump(mode="json")
    result["compression"] = {
        "window": draw(st.sampled_from([window, "query"])),
        "size": window + more,
        "method": parameters,
    }
    low, middle, high = sorted(draw(st.lists(value, min_size=3, max_size=3)))
    difference = {"value": middle, "interval_95": draw(st.sampled_from([None, [low, high]]))}
    metrics = result["results"]["metrics"]
    # A metric's name is no arbitrary label: its score is held against the metrics.
    objective = draw(st.sampled_from(sorted(metrics)) | label)
    result["search"]["objective"] = objective
    score = metrics.get(objective, middle)
    interval = draw(st.sampled_from([None, [min(low, score), max(high, score)]]))
    judged = {"objective": objective, "value": score, "interval_95": interval}
    result["results"]["tuning"] |= judged
    if others:
        result["results"]["held_out"] = judged | {"samples": draw(st.integers(1, len(others)))}
    result["results"]["baselines"][0] |= {
        "method": parameters,
        "difference": draw(st.sampled_from([None, difference])),
    }
    result["search"]["space"] = draw(st.dictionaries(parameter, searched, max_size=16))
    created = draw(st.datetimes(min_value=datetime(1970, 1, 1)))
    result["environment"]["created"] = created.isoformat() + "Z"
    return result


@settings(deadline=None, max_examples=60)
@given(written=documents())
def test_what_is_written_reads_back(tmp_path_factory: pytest.TempPathFactory, written: Document) -> None:
    path = tmp_path_factory.mktemp("roundtrip") / "profile.json"
    original = Profile.model_validate_json(json.dumps(written))
    original.save(path)
    assert Profile.load(path) == original
    stored = json.loads(path.read_text("utf-8"))
    moment = datetime.fromisoformat(stored["environment"].pop("created"))
    assert moment == datetime.fromisoformat(written["environment"].pop("created"))
    assert stored == written


def test_file_is_the_document_in_declared_order_and_the_same_every_time(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    profile().save(first)
    Profile.load(first).save(second)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_text("utf-8") == json.dumps(document(), indent=2, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("method", [SnapKV(kernel_size=15), TopK(), StreamingLLM()], ids=lambda m: m.name)
def test_profile_carries_any_method(tmp_path: Path, method: Any) -> None:
    made = document()
    made["compression"]["method"] = made["results"]["baselines"][0]["method"] = method.model_dump()
    Profile.model_validate_json(json.dumps(made)).save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json").compression.method == method
