from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterprof.profile import profile_path


@pytest.mark.parametrize(
    ("model_id", "dataset", "expected"),
    [
        ("builtin", "needle", "profiles/builtin/needle-256.json"),
        (
            "org/My.Model-v0.2",
            "qasper",
            "profiles/org--My.Model-v0.2/qasper-256.json",
        ),
        ("/data/models/My.Model/", "lines", "profiles/My.Model/lines-256.json"),
        ("./My.Model", "lines", "profiles/My.Model/lines-256.json"),
        ("C:\\models\\My.Model", "lines", "profiles/My.Model/lines-256.json"),
    ],
)
def test_default_path(model_id: str, dataset: str, expected: str) -> None:
    assert profile_path(model_id, dataset, 256) == Path(expected)


def test_another_methods_profile_has_its_name() -> None:
    assert profile_path("builtin", "needle", 256, "clusterattn") == Path("profiles/builtin/needle-256.json")
    assert profile_path("builtin", "needle", 256, "h2o") == Path("profiles/builtin/needle-256-h2o.json")
    # A dataset cannot pass for a method.
    assert profile_path("builtin", "needle-256-h2o", 256) != profile_path("builtin", "needle", 256, "h2o")


@settings(deadline=None)
@given(st.text() | st.sampled_from(["../../x", "..", "/", "", "a/../..", "~/x", "\0", "x" * 5000]), st.text())
def test_default_path_never_escapes(model_id: str, dataset: str) -> None:
    path = profile_path(model_id, dataset, 256)
    assert path.parts[0] == "profiles"
    assert len(path.parts) == 3
    for part in path.parts:
        assert part.isascii()
        assert part.isprintable()
        assert not part.startswith(".")
        assert len(part) <= 120


def test_names_that_differ_never_share_a_file() -> None:
    names = [
        "a b",
        "a-b",
        "a?b",
        "数据",
        "данные",
        "",
        ".",
        "..",
        "x" * 90,
        "x" * 91,
        "a/b.jsonl",
        "a\\b.jsonl",
    ]
    assert len({profile_path("builtin", name, 256) for name in names}) == len(names)
