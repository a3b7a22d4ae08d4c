from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import http.server
import socket
import threading

import pytest
from idx_files import contents

from cordee.core.errors import DataError, StorageError
from cordee.core.settings import Data
from cordee.data import load_data, mnist
from cordee.data.files import Download, fetch


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    """A web server for the folder `web`; gives its address."""
    (tmp_path / "web").mkdir()
    handler = functools.partial(QuietHandler, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def offered(tmp_path, name: str, content: bytes, *mirrors: str) -> Download:
    (tmp_path / "web" / name).write_bytes(content)
    return Download(name, mirrors, hashlib.sha256(content).hexdigest())


def test_file_is_fetched_once_and_left_whole(tmp_path, server):
    download = offered(tmp_path, "a.gz", b"x" * 3_000_000, server)
    fetch([download], tmp_path / "to" / "here", advice="")
    assert [path.name for path in (tmp_path / "to/here").iterdir()] == ["a.gz"]
    assert (tmp_path / "to/here/a.gz").read_bytes() == b"x" * 3_000_000
    (tmp_path / "web/a.gz").unlink()
    fetch([download], tmp_path / "to" / "here", advice="")


def test_damaged_file_never_gets_its_name(tmp_path, server):
    download = offered(tmp_path, "a.gz", b"right", server)
    (tmp_path / "web/a.gz").write_bytes(b"wrong")
    with pytest.raises(DataError, match=r"a.gz: the checksum is \w+, expected \w+.*do this instead"):
        fetch([download], tmp_path / "to", advice="do this instead")
    assert list((tmp_path / "to").iterdir()) == []


def test_next_mirror_is_tried(tmp_path, server):
    download = offered(tmp_path, "a.gz", b"right", f"{server}/nowhere", server)
    fetch([download], tmp_path / "to", advice="")
    assert (tmp_path / "to/a.gz").read_bytes() == b"right"


def test_no_network(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening: connections are refused
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(DataError, match=r"cannot fetch a.gz .*refused.*copy it by hand"):
            fetch([Download("a.gz", (address,), "")], tmp_path / "to", advice="copy it by hand")
    assert list((tmp_path / "to").iterdir()) == []


def test_server_that_lacks_the_file(tmp_path, server):
    with pytest.raises(DataError, match="the server answered 404"):
        fetch([Download("a.gz", (server,), "")], tmp_path / "to", advice="")


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot make the folder"):
        fetch([], tmp_path / "file" / "folder", advice="")


@pytest.mark.parametrize("with_root", [False, True])
def test_data_set_is_fetched_when_the_job_says_so(isolated_places, server, monkeypatch, with_root):
    downloads = tuple(
        offered(isolated_places, f"{name}.gz", gzip.compress(content), server) for name, content in contents().items()
    )
    monkeypatch.setattr(mnist, "MNIST", dataclasses.replace(mnist.MNIST, downloads=downloads))
    root = {"root": str(isolated_places / "chosen")} if with_root else {}
    splits = load_data(Data(use="mnist", args={"download": True, **root}), seed=0)
    assert splits.train.num_samples == 6
    folder = isolated_places / ("chosen" if with_root else "cache/data/mnist")
    assert len(list(folder.iterdir())) == 4
    again = load_data(Data(use="mnist", args=root), seed=0)
    assert again.train.num_samples == 6


def test_failed_download_says_what_to_do_instead(isolated_places, server, monkeypatch):
    broken = tuple(dataclasses.replace(one, mirrors=(server,)) for one in mnist.FASHION_MNIST.downloads)
    monkeypatch.setattr(mnist, "FASHION_MNIST", dataclasses.replace(mnist.FASHION_MNIST, downloads=broken))
    with pytest.raises(DataError, match=r"cannot fetch .*404.*Put the files into .*apt-get install"):
        load_data(Data(use="fashion-mnist", args={"download": True}), seed=0)
