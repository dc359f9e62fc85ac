import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from clusterprof.data import hub
from clusterprof.data.hub import download_longbench, is_hub_id, load_hub_dataset
from clusterprof.errors import DataError

COMMIT = "a" * 40
CONTENT = b"what data.zip holds"


class FakeHub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as one dataset with one file needs."""

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", '"f00"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path.startswith("/api/datasets/zai-org/LongBench"):
            self._answer(json.dumps({"id": "zai-org/LongBench", "sha": COMMIT}).encode())
        elif self.path == "/datasets/zai-org/LongBench/resolve/main/data.zip":
            self._answer(CONTENT)
        else:
            self.send_error(404)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may see the cache of the machine it runs on."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def use_endpoint(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    endpoint = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        huggingface_hub.constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    use_endpoint(monkeypatch, server.server_port)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint on which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        use_endpoint(monkeypatch, unused.getsockname()[1])


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An endpoint that takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        use_endpoint(monkeypatch, listening.getsockname()[1])
        yield


def test_longbench_is_downloaded_once_and_then_needs_no_network(
    fake_hub: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = download_longbench()
    assert path.read_bytes() == CONTENT
    monkeypatch.setattr(hub, "_why_unreachable", lambda repo: pytest.fail("asked the hub again"))
    assert download_longbench() == path


@pytest.mark.usefixtures("no_network")
def test_without_a_network_longbench_names_both_ways_out_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(DataError) as raised:
        download_longbench()
    assert time.monotonic() - started < 10
    message = str(raised.value)
    assert "--data-dir FOLDER with LongBench's JSONL files or data.zip" in message
    assert "connect to a network" in message
    assert "\n" not in message


@pytest.mark.usefixtures("silent_hub")
def test_a_hub_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the program waits at worst leaves most of 30 seconds for the rest of its start.
    assert hub.REQUEST_TIMEOUT_S < hub.REACH_TIMEOUT_S < 15
    monkeypatch.setattr(hub, "REACH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(hub, "REQUEST_TIMEOUT_S", 1.0)
    with pytest.raises(DataError, match=r"no answer within 0 s.*--data-dir"):
        download_longbench()
    monkeypatch.setattr(hub, "REACH_TIMEOUT_S", 5.0)
    monkeypatch.setattr(hub, "REQUEST_TIMEOUT_S", 0.2)
    with pytest.raises(DataError, match=r"timed out.*--data-dir"):
        download_longbench()


def test_a_failing_download_is_one_sentence(fake_hub: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise OSError(28, "No space left\n on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(DataError, match=r"No space left on device.*--data-dir"):
        download_longbench()


def test_what_a_hub_id_looks_like() -> None:
    for name in ("org/name", "org/na.me-1_x", "org/name:config", "org/name@train", "o/n:c@test[:10]"):
        assert is_hub_id(name)
    for name in ("name", "org/", "/name", "org/name:", "org/name@", "a/b/c", "../name", "org /name", "./x"):
        assert not is_hub_id(name)


@pytest.mark.usefixtures("no_network")
def test_without_a_network_a_hub_dataset_names_the_ways_out() -> None:
    with pytest.raises(DataError) as raised:
        load_hub_dataset("org/name")
    assert re.search("org/name cannot be fetched.*network.*HF_HUB_OFFLINE=1.*local file", str(raised.value))


class Library:
    """Stands in for what `datasets` would fetch; the tables it returns are its own."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, columns: dict[str, list[Any]], splits: list[str]
    ) -> None:
        import datasets  # type: ignore[import-untyped]

        self.asked: list[tuple[object, ...]] = []
        self.table = datasets.Dataset.from_dict(columns)
        monkeypatch.setattr(hub, "_why_unreachable", lambda repo: None)
        monkeypatch.setattr(datasets, "get_dataset_split_names", lambda repo, config: splits)
        monkeypatch.setattr(datasets, "load_dataset", self.load)

    def load(self, repo: str, config: str | None, *, split: str) -> Any:
        self.asked.append((repo, config, split))
        return self.table


def test_a_hub_dataset_becomes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    columns: dict[str, list[Any]] = {
        "context": ["c", "c"],
        "question": ["p?", "q?"],
        "answers": [["1"], ["2"]],
        "length": [4, 5],
    }
    library = Library(monkeypatch, columns, ["train", "test", "validation"])
    dataset = load_hub_dataset("org/name:small")
    assert library.asked == [("org/name", "small", "test")]
    assert [row.messages[0].content for row in dataset.rows] == ["c\n\np?", "c\n\nq?"]
    assert [row.answers for row in dataset.rows] == [("1",), ("2",)]
    assert (dataset.name, dataset.split) == ("org/name:small", "test")
    assert dataset.source == "hub org/name, config small"


@pytest.mark.parametrize(
    ("name", "splits", "split"),
    [
        ("org/name", ["train", "validation"], "validation"),
        ("org/name", ["extra", "train"], "train"),
        ("org/name", ["extra"], "extra"),
        ("org/name@train[:5]", ["test"], "train[:5]"),
    ],
)
def test_which_split_is_taken(
    monkeypatch: pytest.MonkeyPatch, name: str, splits: list[str], split: str
) -> None:
    library = Library(monkeypatch, {"prompt": ["p"]}, splits)
    assert load_hub_dataset(name).split == split
    assert library.asked == [("org/name", None, split)]


def test_hub_datasets_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    Library(monkeypatch, {"text": ["x"]}, ["test"])
    with pytest.raises(DataError, match="has the columns text, and none of 'prompt'"):
        load_hub_dataset("org/name")
    Library(monkeypatch, {"prompt": ["x", ""]}, ["test"])
    with pytest.raises(DataError, match="org/name, row 2: the prompt is blank"):
        load_hub_dataset("org/name")


def test_what_the_library_complains_about_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def fail(repo: str, config: str | None) -> list[str]:
        raise ValueError("Config name is missing.\nPlease pick one among: ['a', 'b']")

    monkeypatch.setattr(hub, "_why_unreachable", lambda repo: None)
    monkeypatch.setattr(datasets, "get_dataset_split_names", fail)
    with pytest.raises(DataError, match=r"org/name cannot be loaded: .*pick one among: \['a', 'b'\]\."):
        load_hub_dataset("org/name")
