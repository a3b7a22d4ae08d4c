"""Images in folders, in tar files and in tables."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from table_files import load
from test_tables import everything, refused

from cordee.core.errors import DataError, JobError
from cordee.data import Loader


def picture(value: int, height: int = 4, width: int = 6, mode: str = "RGB") -> bytes:
    """Return a PNG of one colour."""
    file = io.BytesIO()
    color: Any = value if mode in ("L", "P") else (value, 2 * value, 3 * value)
    Image.new(mode, (width, height), color).save(file, "PNG")
    return file.getvalue()


def folders(root: Path, **classes: int) -> Path:
    """Make folders of so many images each."""
    value = 0
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            (root / name / f"{number}.png").write_bytes(picture(value))
            value += 1
    return root


def tar_of(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CORDEE_CACHE", str(cache))
    return cache


def mirrored(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image, dtype=np.float32))[..., 0] + torch.rand(())


# Folders


def test_folders_are_classes(tmp_path: Path) -> None:
    splits = load("image-folder", path=folders(tmp_path, dog=2, cat=3))
    assert splits.class_names == ("cat", "dog") and splits.num_classes == 2 and splits.input_shape == (3, 4, 6)
    inputs, targets = everything(splits.train)
    assert targets.tolist() == [0, 0, 0, 1, 1]
    assert inputs.dtype == torch.float32
    assert (inputs[:, 0, 0, 0] * 255).round().tolist() == [2, 3, 4, 0, 1]
    assert (inputs[3:, 2, 3, 5] * 255).round().tolist() == [0, 3]


def test_links_and_hidden_folders_above(tmp_path: Path) -> None:
    place = folders(tmp_path / ".cache" / "set", cat=2, dog=1)
    folders(tmp_path / "elsewhere", more=3)
    (place / "dog" / "linked").symlink_to(tmp_path / "elsewhere" / "more")
    (place / "dog" / ".hidden").mkdir()
    (place / "dog" / ".hidden" / "0.png").write_bytes(picture(1))
    assert everything(load("image-folder", path=place).train)[1].tolist() == [0, 0, 1, 1, 1, 1]
    (place / "dog" / "again").symlink_to(place / "dog")
    refused(r"again is a link to a folder that it is in", use="image-folder", path=place)


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_images_of_more_than_8_bits_are_refused(tmp_path: Path, mode: str) -> None:
    """Pillow makes 255 of all larger numbers."""
    place = folders(tmp_path, cat=2, dog=1)
    Image.new(mode, (6, 4), 1000).save(place / "dog" / "x.tiff")
    refused(rf"x.tiff has pixels of more than 8 bits \({mode}\).*data.transform", use="image-folder", path=place)
    splits = load("image-folder", path=place, transform=f"{__name__}:as_numbers")
    assert splits.train.gather(torch.tensor([3])).inputs.unique().item() == 1000


def as_numbers(image: Image.Image) -> torch.Tensor:
    pixels = np.array(image, dtype=np.float32)
    return torch.from_numpy(pixels if pixels.ndim == 2 else pixels[..., 0])


def test_every_image_once_in_any_process(tmp_path: Path) -> None:
    folders(tmp_path, a=5, b=6)
    settings = {"batch_size": 4, "seed": 0, "shuffle": True}
    colored = load("image-folder", path=tmp_path)
    one, other = (list(Loader(colored.train, processes=n, **settings).batches(1)) for n in (0, 2))
    assert all(
        torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets) for a, b in zip(one, other, strict=True)
    )
    drawing = load("image-folder", path=tmp_path, transform=mirrored)
    one_drawn, other_drawn = (list(Loader(drawing.train, processes=n, **settings).batches(1)) for n in (0, 2))
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(one_drawn, other_drawn, strict=True))
    values = torch.cat([batch.inputs[:, 0, 0, 0] for batch in one]) * 255
    assert sorted(values.round().tolist()) == list(range(11))


def test_resize_color_and_transform(tmp_path: Path) -> None:
    folders(tmp_path, a=2, b=2)
    (tmp_path / "a" / "1.png").write_bytes(picture(9, 8, 8))
    assert load("image-folder", path=tmp_path, resize=[5, 7]).input_shape == (3, 5, 7)
    assert load("image-folder", path=tmp_path, resize=[5, 7], color="gray").input_shape == (1, 5, 7)
    (tmp_path / "a" / "1.png").write_bytes(picture(9, mode="L"))  # another mode, the same size
    assert load("image-folder", path=tmp_path).input_shape == (3, 4, 6)
    assert load("image-folder", path=tmp_path, transform=lambda image: torch.zeros(image.height, 2)).input_shape == (
        4,
        2,
    )
    refused(r"data.resize = \[5\] must be \[height, width\]", JobError, use="image-folder", path=tmp_path, resize=[5])
    refused(r"data.color = 'blue' does not fit", JobError, use="image-folder", path=tmp_path, color="blue")


def test_a_test_folder_has_the_classes_of_the_training_folder(tmp_path: Path) -> None:
    folders(tmp_path / "train", cat=2, dog=2)
    splits = load("image-folder", path=tmp_path / "train", test=folders(tmp_path / "test", dog=3))
    assert everything(splits.test)[1].tolist() == [1, 1, 1]
    folders(tmp_path / "more", cat=1, dgo=1)
    refused(
        r"has the class folder 'dgo', which the training set has not; did you mean 'dog'",
        use="image-folder",
        path=tmp_path / "train",
        test=tmp_path / "more",
    )


def test_empty_class_folders_are_named(tmp_path: Path) -> None:
    folders(tmp_path, ash=2, elm=0, oak=1)
    splits = load("image-folder", path=tmp_path)
    assert splits.num_classes == 3 and everything(splits.train)[1].tolist() == [0, 0, 2]
    assert splits.warnings == ("the training set of image-folder has no sample of class 1 ('elm')",)


def test_folders_without_what_is_needed(tmp_path: Path) -> None:
    refused(r"data.path = '.*nothing' is not a folder", use="image-folder", path=tmp_path / "nothing")
    (tmp_path / "0.png").write_bytes(picture(1))
    refused(r"it has 1 images and no class folder with images", use="image-folder", path=tmp_path)
    folders(tmp_path / "one", a=3)
    refused(r"has one class folder, 'a'", use="image-folder", path=tmp_path / "one")
    folders(tmp_path / "none", a=0, b=0)
    refused(r"no class folder has an image", use="image-folder", path=tmp_path / "none")


def test_images_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folders(tmp_path, a=2, b=2)
    (tmp_path / "b" / "0.png").write_bytes(b"no image")
    refused(r"b/0.png cannot be read as an image: it is empty, damaged, or of a", use="image-folder", path=tmp_path)
    (tmp_path / "b" / "0.png").write_bytes(b"")
    (tmp_path / "b" / "1.png").write_bytes(b"neither")
    refused(
        r"b/0.png cannot .*b/1.png cannot be read as an image.*\(2 images in all\)", use="image-folder", path=tmp_path
    )
    noisy = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 60, 3), dtype=np.uint8))
    noisy.save(tmp_path / "b" / "0.png")
    whole = (tmp_path / "b" / "0.png").read_bytes()
    for name in ("a/0", "a/1", "b/1"):
        (tmp_path / f"{name}.png").write_bytes(whole)
    (tmp_path / "b" / "0.png").write_bytes(whole[: len(whole) // 2])  # the header is all right
    splits = load("image-folder", path=tmp_path)
    with pytest.raises(DataError, match=r"b/0.png cannot be read as an image"):
        everything(splits.train)


def test_images_of_other_sizes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path, a=3, b=2)
    (tmp_path / "a" / "1.png").write_bytes(picture(9, 8, 9))
    refused(
        r"2 different sizes .*4 × 6 \(4 of them, .*8 × 9 \(.*a/1.png\): set data.resize = \[4, 6\]",
        use="image-folder",
        path=tmp_path,
    )
    monkeypatch.setattr("cordee.data.images._NUM_LOOKED_AT", 2)  # of a large set not all headers are looked at
    splits = load("image-folder", path=tmp_path)
    with pytest.raises(DataError, match=r"a/1.png has 8 × 9 pixels .* and the first image has 4 × 6"):
        everything(splits.train)


def test_folders_of_an_fsspec_storage(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    try:
        for name in ("cat/1.png", "dog/1.png", "dog/2.png"):
            memory.pipe(f"/pictures/{name}", picture(3))
        splits = load("image-folder", path="memory://pictures")
        assert splits.class_names == ("cat", "dog") and everything(splits.train)[1].tolist() == [0, 1, 1]
    finally:
        memory.rm("/pictures", recursive=True)


def test_a_folder_behind_a_url_has_the_samples_of_a_local_one(tmp_path: Path) -> None:
    """Cameras write names that begin with "_", and "cat-big/" comes before "cat/" among the names of files."""
    folders(tmp_path, **{"cat": 2, "cat-big": 1, "_none": 1, ".hidden": 1})
    (tmp_path / "cat" / "_DSC0001.png").write_bytes(picture(40))
    local, remote = (load("image-folder", path=f"{start}{tmp_path}") for start in ("", "file://"))
    assert local.class_names == remote.class_names == ("_none", "cat", "cat-big")
    for one, other in zip(everything(local.train), everything(remote.train), strict=True):
        assert torch.equal(one, other)
    assert local.train.num_samples == 5


# Tar files


def test_members_by_folder_and_by_label_files(tmp_path: Path) -> None:
    tar_of(tmp_path / "0.tar", {"cat/a.png": picture(1), "dog/b.png": picture(2), "README": b"text"})
    tar_of(tmp_path / "1.tar", {"dog/c.png": picture(3)})
    splits = load("image-tar", path=tmp_path)
    assert splits.class_names == ("cat", "dog") and everything(splits.train)[1].tolist() == [0, 1, 1]
    assert (everything(splits.train)[0][:, 0, 0, 0] * 255).round().tolist() == [1, 2, 3]
    numbered = {"x/1.png": picture(1), "x/1.cls": b"2\n", "x/2.png": picture(2), "x/2.cls": b"0"}
    splits = load("image-tar", path=tar_of(tmp_path / "n.tar", numbered))
    assert splits.num_classes == 3 and everything(splits.train)[1].tolist() == [2, 0]
    assert "class 1" in splits.warnings[0]
    padded = {"00/1.png": picture(1), "07/2.png": picture(2)}
    splits = load("image-tar", path=tar_of(tmp_path / "p.tar", padded))
    assert splits.class_names == ("00", "07") and everything(splits.train)[1].tolist() == [0, 1]


def test_the_index_of_a_tar_file_is_kept_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tar_of(tmp_path / "0.tar", {"cat/a.png": picture(1), "dog/b.png": picture(2)})
    first = load("image-tar", path=path)
    with monkeypatch.context() as patch:
        patch.setattr("cordee.data.images._find_members", lambda file: pytest.fail("looked for again"))
        again = load("image-tar", path=path)
    assert torch.equal(everything(first.train)[0], everything(again.train)[0])
    tar_of(path, {"cat/a.png": picture(1), "dog/b.png": picture(2), "dog/c.png": picture(5)})
    assert load("image-tar", path=path).train.num_samples == 3


def test_members_that_are_links_are_the_images_that_they_link_to(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "0.tar", {"cat/a.png": picture(1), "dog/b.png": picture(2)})

    def link(kind: bytes, name: str, target: str) -> None:
        with tarfile.open(path, "a") as archive:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)

    link(tarfile.LNKTYPE, "cat/c.png", "dog/b.png")
    link(tarfile.SYMTYPE, "dog/d.png", "../cat/a.png")
    inputs, targets = everything(load("image-tar", path=path).train)
    assert targets.tolist() == [0, 1, 0, 1]
    assert (inputs[:, 0, 0, 0] * 255).round().tolist() == [1, 2, 2, 1]
    link(tarfile.SYMTYPE, "dog/e.png", "/somewhere/e.png")
    refused(r"0.tar: dog/e.png is a link to /somewhere/e.png, which is not in it before", use="image-tar", path=path)


def test_tar_files_that_cannot_be_used(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "0.tar", {"cat/a.png": picture(1), "dog/b.png": b"broken", "dog/c.png": picture(1)})
    refused(r"dog/b.png of .*0.tar cannot be read as an image", use="image-tar", path=path)
    tar_of(path, {"a.png": picture(1)})
    refused(r"0.tar: a.png has no label: add a.cls, or a folder of its class", use="image-tar", path=path)
    tar_of(path, {"x/a.png": picture(1), "x/a.cls": b"1", "x/b.png": picture(1)})
    refused(r"x/a.png and x/b.png have their labels in different ways", use="image-tar", path=path)
    tar_of(path, {"readme.txt": b"nothing"})
    refused(r"no tar file has an image", use="image-tar", path=path)
    path.write_bytes(b"no tar file" * 100)
    refused(r"0.tar cannot be read as a tar file", use="image-tar", path=path)
    whole = tar_of(path, {"cat/a.png": picture(1), "dog/b.png": bytes(5000)}).read_bytes()
    path.write_bytes(whole[:3000])
    refused(r"0.tar (is truncated: it ends within dog/b.png|cannot be read as a tar file)", use="image-tar", path=path)
    whole = tar_of(path, {"cat/a.png": picture(1), "dog/b.png": picture(2), "dog/c.png": picture(3)}).read_bytes()
    header = whole.index(b"dog/c.png")
    for end in (header, header + 100):  # before a header, and within it
        path.write_bytes(whole[:end])
        refused(r"0.tar is truncated: it has no end mark", use="image-tar", path=path)


# Tables


def test_images_in_a_column_as_hugging_face_writes_them(tmp_path: Path) -> None:
    rows = [{"bytes": picture(n), "path": None} for n in range(6)]
    pq.write_table(pa.table({"image": rows, "label": [0, 1, 2, 0, 1, 2]}), tmp_path / "a.parquet", row_group_size=2)
    for key, value in (("shape", [3, 4, 6]), ("kind", "bytes")):
        with pytest.raises(JobError, match=f"data.{key} is not for images, which column 'image' has"):
            load(path=tmp_path / "a.parquet", resize=[4, 4], **{key: value})
    numbers = load(path=tmp_path / "a.parquet", resize=[4, 4], regression=True)
    targets = numbers.train.gather(torch.arange(6)).targets
    assert numbers.num_classes is None and targets.tolist() == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]
    assert targets.dtype == torch.float32
    splits = load(path=tmp_path / "a.parquet", resize=[4, 4])
    inputs, targets = everything(splits.train)
    assert (splits.num_classes, splits.input_shape, targets.tolist()) == (3, (3, 4, 4), [0, 1, 2, 0, 1, 2])
    assert (inputs[:, 0, 0, 0] * 255).round().tolist() == list(range(6))
    rows[3] = {"bytes": b"broken", "path": None}
    pq.write_table(pa.table({"image": rows, "label": ["a", "b"] * 3}), tmp_path / "a.parquet", row_group_size=2)
    splits = load(path=tmp_path / "a.parquet")
    assert splits.class_names == ("a", "b")
    with pytest.raises(DataError, match=r"row group 1 of .*a.parquet, row 3: the image cannot be read as an image"):
        everything(splits.train)
