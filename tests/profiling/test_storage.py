"""Why a storage cannot be opened, and that its password is not told."""

from pathlib import Path

import pytest

from clusterprof.errors import ClusterprofError
from clusterprof.profiling.storage import open_storage, unusable


def test_the_reason_is_told(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'missing' / 'study.db'}"
    with pytest.raises(ClusterprofError) as caught:
        open_storage(url)
    assert str(caught.value) == (
        f"The study storage {url} cannot be opened ((sqlite3.OperationalError) unable to open database file); give "
        "--storage a URL such as sqlite:///study.db, with the database's driver installed."
    )


@pytest.mark.parametrize(
    ("url", "reason", "told"),
    [
        (
            "postgresql://me:s3cret@host/db",
            "no way to postgresql://me:s3cret@host/db\nDETAIL: s3cret",
            "no way to postgresql://me:***@host/db",
        ),
        # A driver that takes what follows the first @ for the host.
        ("mysql://me:s3@cr3t@host/db", 'unknown host "cr3t@host"', 'unknown host "***@host"'),
        ("mysql://me:s3%40cr3t@host/db", "denied for s3@cr3t", "denied for ***"),
        ("mysql://host/db?password=s3cret&x=1", "bad option s3cret", "bad option ***"),
        ("me:s3cret@host", "no URL: me:s3cret@host", "no URL: ***"),
        ("sqlite:////home/me@work/s:t.db", "locked: /home/me@work/s:t.db", "locked: /home/me@work/s:t.db"),
        ("mysql://me:s3cret@host/db", "", "ValueError"),
        ("mysql://me:s3cret@host/db", "ends.", "ends"),
        ("mysql://host/db", "\x1b[2J" + "x" * 400, "\\x1b[2J" + "x" * 293 + "..."),
        ("", "no URL", "no URL"),
    ],
)
def test_no_part_of_a_password_is_told(url: str, reason: str, told: str) -> None:
    sentence = str(unusable(url, ValueError(reason)))
    assert f" cannot be opened ({told}); give --storage a URL" in sentence
    assert "cr3t" not in sentence
    assert "s3cret" not in sentence
