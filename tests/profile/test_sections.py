import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from clusterprof import Profile
from clusterprof.methods import TopK
from clusterprof.profile import Compression, Difference, Search, first_problem
from tests.profile.examples import changed, document, profile, refusal


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema_version", 2),
        ("schema_version", "1"),
        ("schema_version", None),
        ("schema_version", True),
        ("schema_version", 1.0),
        ("colour", "blue"),
        ("model", []),
        ("model.colour", "blue"),
        ("model.architecture", ""),
        ("model.id", "x" * 1001),
        ("model.id", "two\nlines"),
        ("model.id", "\x1b[31mred"),
        ("model.num_hidden_layers", 2.5),
        ("model.num_hidden_layers", "2"),
        ("model.num_hidden_layers", True),
        ("model.num_hidden_layers", 0),
        ("model.num_hidden_layers", 10**30),
        ("model.rope", {"rope_theta": float("nan")}),
        ("model.rope", {"nested": [1, {"deep": float("inf")}]}),
        ("model.rope", [1]),
        ("model.tokenizer_hash", "A" * 64),
        ("model.tokenizer_hash", None),
        ("dataset.fraction", 0),
        ("dataset.fraction", 1.5),
        ("dataset.seed", -1),
        ("dataset.sampled_ids", []),
        ("dataset.sampled_ids", "needle-3"),
        ("dataset.sampled_ids", ["x"] * 4097),
        ("dataset.held_out_ids", None),
        ("dataset.held_out_ids", "needle-5"),
        ("dataset.held_out_ids", ["x"] * 4097),
        ("compression.size", 32),
        ("compression.size", 0),
        ("compression.size", -5),
        ("compression.window", 0),
        ("compression.window", "32"),
        ("compression.window", "question"),
        ("compression.window", None),
        ("compression.window", True),
        ("compression.window", 8.0),
        ("compression.window", 2**53 + 1),
        ("compression.method", {"name": "magic"}),
        ("compression.method", "clusterattn"),
        ("compression.method.num_block", 0),
        ("compression.method.num_block", "8"),
        ("compression.method.theta", float("nan")),
        ("compression.method.theta", -1e-3),
        ("compression.method.theta", True),
        ("compression.method.colour", "blue"),
        ("results.tuning.value", float("nan")),
        ("results.tuning.value", float("inf")),
        ("results.tuning.value", None),
        ("results.tuning.interval_95", [0.9]),
        ("results.tuning.interval_95", [0.9, 0.8]),
        ("results.tuning.samples", 0),
        ("results.held_out", {}),
        ("results.metrics", None),
        ("results.metrics.cosine", 1.5),
        ("results.metrics.kl", float("nan")),
        ("results.metrics.agreement", -0.5),
        ("results.baselines", {}),
        ("results.tuning.value", 1e300),
        ("results.tuning.interval_95", [0.9, 1e300]),
        ("search.duration_s", -1),
        ("search.duration_s", 1e300),
        ("search.space", None),
        ("search.space", {f"parameter_{n}": [0, 1] for n in range(17)}),
        ("search.space.two words", [0, 1]),
        ("search.space.theta", [0.5, 0.1]),
        ("search.space.theta", [0.1]),
        ("search.space.theta", [0.1, 0.5, 0.7]),
        ("search.space.theta", [float("nan"), 1.0]),
        ("search.space.theta", [0.0, float("inf")]),
        ("search.space.theta", [0.0, 1e300]),
        ("search.space.theta", 0.1),
        ("search.space.theta", None),
        ("search.space.theta", {}),
        ("search.space.num_block", [32, 1]),
        ("search.space.num_block", [-1, 32]),
        ("search.space.num_block", [1, 2**53 + 1]),
        ("search.space.num_block", [True, False]),
        ("search.space.num_block", []),
        ("search.space.num_block", [[1], 2]),
        ("search.space.pooling", ["avg", 1]),
        ("search.space.pooling", ["avg", None]),
        ("search.space.pooling", ["x"] * 65),
        ("search.space.pooling", [""]),
        ("search.space.pooling", ["a\x1b[2J"]),
        ("search.space.pooling", ["x" * 201]),
        ("search.dropped_samples", [{"id": "a"}]),
        ("environment.created", "yesterday"),
        ("environment.created", "2026-01-02T03:04:05"),
        ("environment.created", "0001-01-01T00:00:00+23:00"),
    ],
)
def test_wrong_field_is_named(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(changed(field, value)))
    message = refusal(path)
    assert str(path) in message
    # A method's parameter is reported under the method's name.
    for name in field.split("."):
        assert name in message


@pytest.mark.parametrize("char", [*"\n\x1b\x7f\x9b\u2028\u2029\u202a\u202e\u2066\u2069"])
def test_nothing_a_terminal_would_obey_is_kept(tmp_path: Path, char: str) -> None:
    path = tmp_path / "p.json"
    name = f"a{char}b"
    for field, value in (
        ("model.id", name),
        ("dataset.name", name),
        ("dataset.sampled_ids", [name]),
        ("search.dropped_samples", [{"id": name, "reason": "none"}]),
        ("search.dropped_samples", [{"id": "a", "reason": name}]),
    ):
        path.write_text(json.dumps(changed(field, value)))
        message = refusal(path)
        assert field in message
        assert message.isprintable()


def test_any_missing_field_is_named_unless_it_may_be_null(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    nullable = {
        "revision",
        "chat_template_hash",
        "split",
        "tokens",
        "held_out",
        "storage",
    }
    for section, content in document().items():
        mutilated = document()
        del mutilated[section]
        path.write_text(json.dumps(mutilated))
        assert f"{section}: field required" in refusal(path)
        for field in content if isinstance(content, dict) else []:
            mutilated = document()
            del mutilated[section][field]
            path.write_text(json.dumps(mutilated))
            if field in nullable:
                assert getattr(getattr(Profile.load(path), section), field) is None
            else:
                assert f"{section}.{field}: field required" in refusal(path)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("dataset.held_out_ids", ["needle-5", "needle-3"], "a row that was tuned on cannot be held out"),
        ("results.tuning.value", 0.5, "the value 0.5 must be between the ends of its interval"),
        ("results.baselines.0.difference.value", 0.08, "the value 0.08 must be between"),
        (
            "results.held_out",
            {"objective": "kl", "value": 0.125, "samples": 1},
            "its objective must be cosine",
        ),
        (
            "results.held_out",
            {"objective": "cosine", "value": 0.9, "samples": 1},
            "cosine is 0.98, and 0.9 in the score of the same samples",
        ),
        ("results.metrics.cosine", 0.9, "cosine is 0.9, and 0.98 in the score"),
        (
            "compression.overrides",
            [{"layers": [0, 2], "method": document()["compression"]["method"]}],
            "an override is for layer 2, and the last layer is 1",
        ),
        (
            "results.baselines.0.overrides",
            [{"layers": [2], "method": document()["compression"]["method"]}],
            "an override is for layer 2, and the last layer is 1",
        ),
        ("results.baselines", [], "the baselines must have clusterattn"),
        ("dataset.prompts_cut", 3, "it must be at most 2, the rows that were tuned on"),
        ("dataset.prompts_fitting", 3, "it must be at most 2, the rows that were tuned on"),
        ("results.tuning.samples", 3, "a score is of 3 samples that were tuned on, of 2"),
        (
            "results.held_out",
            {"objective": "cosine", "value": 0.98, "samples": 2},
            "a score is of 2 samples that were held out, of 1",
        ),
        ("search.objective", "kl", "its objective must be cosine, as in the results"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, field: str, value: Any, told: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(changed(field, value)))
    message = refusal(path)
    assert told in message
    # Neither a whole section, nor a second complaint about the same.
    assert "{" not in message
    assert "more" not in message


def test_an_objective_that_this_release_does_not_know_is_not_compared() -> None:
    other = changed("search.objective", "model_dump")
    other["results"]["tuning"]["objective"] = "model_dump"
    assert Profile.model_validate_json(json.dumps(other)).search.objective == "model_dump"


def test_size_must_exceed_the_window() -> None:
    with pytest.raises(ValidationError) as caught:
        Compression(size=32, window=32, method=TopK())
    assert first_problem(caught.value) == "size: with a window of 32 it must be at least 33 (got 32)"
    assert Compression(size=33, window=32, method=TopK()).size == 33


def test_the_window_may_be_the_question_however_long_it_is() -> None:
    assert Compression(size=2, window="query", method=TopK()).window == "query"
    with pytest.raises(ValidationError) as caught:
        Compression(size=1, window="query", method=TopK())
    assert (
        first_problem(caught.value) == "size: with the question as the window it must be at least 2 (got 1)"
    )


@pytest.mark.parametrize("window", [0, -3, 2.5, "Query", "", True, None, [32]])
def test_another_window_is_told_what_it_may_be_once(window: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Compression(size=64, window=window, method=TopK())
    expected = 'window: it must be "query" or a whole number from 1 to 2**53'
    assert first_problem(caught.value) == f"{expected} (got {window!r})"


def test_profile_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        profile().compression.size = 1


@pytest.mark.parametrize(
    ("given_url", "kept"),
    [
        ("sqlite:///study.db", "sqlite:///study.db"),
        ("sqlite:////home/me@work/study.db", "sqlite:////home/me@work/study.db"),
        ("studies/journal@2.log", "studies/journal@2.log"),
        ("postgresql://user:secret@host:5432/db", "postgresql://host:5432/db"),
        ("postgresql+psycopg://user:sec/r@et@host/db", "postgresql+psycopg://host/db"),
        ("mysql://secret@host/db?password=secret", "mysql://host/db"),
        ("mysql:///db?password=secret", "mysql:///db"),
    ],
)
def test_storage_loses_its_credentials(given_url: str, kept: str) -> None:
    search = document()["search"] | {"storage": given_url}
    assert Search.model_validate_json(json.dumps(search)).storage == kept


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("value", None),
        ("value", float("nan")),
        ("value", 1e300),
        ("interval_95", [0.1]),
        ("interval_95", [0.2, 0.1]),
        ("interval_95", [0.1, float("inf")]),
        ("colour", "blue"),
    ],
)
def test_a_difference_is_checked_like_a_score(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "p.json"
    wrong = document()
    wrong["results"]["baselines"][0]["difference"][field] = value
    path.write_text(json.dumps(wrong))
    assert f"results.baselines.0.difference.{field}" in refusal(path)


def test_a_difference_may_have_no_interval() -> None:
    alone = document()
    alone["results"]["baselines"][0]["difference"] = {"value": -0.5}
    baseline, full = Profile.model_validate_json(json.dumps(alone)).results.baselines
    assert baseline.difference == Difference(value=-0.5)
    assert full.difference is None
