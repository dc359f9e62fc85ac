import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from clusterprof.errors import ModelError
from clusterprof.models.source import ModelSource, find_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = b'{"id": "org/public", "sha": "%s", "siblings": []}' % COMMIT.encode()
ANSWERS = {
    "/api/models/org/public": (200, "", MODEL),
    "/api/models/org/public/revision/v1": (200, "", MODEL),
    "/api/models/org/public/revision/v9": (404, "RevisionNotFound", b""),
    "/api/models/org/missing": (401, "RepoNotFound", b""),
    "/api/models/org/broken": (500, "", b""),
}


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def remember(hub_cache: Path, model: str, revision: str) -> None:
    refs = hub_cache / f"models--org--{model}" / "refs"
    refs.mkdir(parents=True)
    (refs / revision).write_text(COMMIT)


class FakeHub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, code, body = ANSWERS[self.path]
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with HTTPServer(("127.0.0.1", 0), FakeHub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("revision", [None, "v1"])
def test_a_model_on_the_hub(hub_cache: Path, revision: str | None) -> None:
    source = find_model("org/public", revision)
    assert (source.id, source.path, source.local_only) == ("org/public", "org/public", False)
    assert (source.revision, source.commit, source.obstacle) == (revision or "main", COMMIT, None)
    # So that it can be found without the hub the next time.
    assert (hub_cache / "models--org--public" / "refs" / (revision or "main")).read_text() == COMMIT


@pytest.mark.usefixtures("hub")
def test_a_model_that_the_hub_does_not_have() -> None:
    with pytest.raises(
        ModelError, match=r"no folder 'org/missing', and the hub shows no such model .* --model builtin"
    ):
        find_model("org/missing", None)


@pytest.mark.usefixtures("hub")
def test_a_revision_that_the_hub_does_not_have() -> None:
    with pytest.raises(ModelError, match="org/public has no revision 'v9'; check --revision"):
        find_model("org/public", "v9")


@pytest.mark.usefixtures("hub")
def test_a_hub_that_fails_leaves_its_cache(hub_cache: Path) -> None:
    remember(hub_cache, "broken", "main")
    source = find_model("org/broken", None)
    assert (source.path, source.revision, source.commit) == ("org/broken", "main", COMMIT)
    assert source.local_only
    assert source.obstacle is not None
    assert "500" in source.obstacle


@pytest.mark.usefixtures("hub")
def test_a_hub_that_fails_and_an_empty_cache() -> None:
    with pytest.raises(
        ModelError, match=r"hub cannot be reached \(.*500.*\) and its cache .* --model builtin"
    ) as caught:
        find_model("org/broken", None)
    assert "\n" not in str(caught.value)


def test_a_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clusterprof.models.source._HUB_PATIENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(
            "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
        started = time.monotonic()
        with pytest.raises(ModelError, match="hub cannot be reached"):
            find_model("org/model", None)
    assert time.monotonic() - started < 5


def test_name_resolution_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clusterprof.models.source._HUB_PATIENCE_S", 0.3)
    released = threading.Event()

    def hang(*args: object, **kwargs: object) -> None:
        released.wait(30)
        raise TimeoutError

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", hang)
    started = time.monotonic()
    with pytest.raises(ModelError, match=r"hub cannot be reached \(no answer within"):
        find_model("org/model", None)
    assert time.monotonic() - started < 5
    released.set()


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert find_model(str(tmp_path), None) == ModelSource(str(tmp_path), str(tmp_path), local_only=True)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json, so it is not a model; name a folder"):
        find_model(str(tmp_path), None)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="is a file; name the folder"):
        find_model(str(tmp_path / "model.gguf"), None)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "two words"])
def test_a_folder_that_is_not_there(name: str) -> None:
    with pytest.raises(
        ModelError, match=r"There is no folder .* and it is no hub id either; .* --model builtin"
    ):
        find_model(name, None)


def test_only_the_hub_has_revisions(tmp_path: Path) -> None:
    for name in ("builtin", str(tmp_path)):
        with pytest.raises(ModelError, match="Only models on the hub have revisions"):
            find_model(name, "main")
