"""CIFAR-10 as images: decoded once for each folder, and a training of another length that leaves the record alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.catalog import BENCHMARKS
from benchmarks.data import cifar
from typer.testing import CliRunner

from benchmarks import runner

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Makes a folder of gray images; the arrays are kept in a temporary folder."""
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(cifar.tempfile, "tempdir", str(tmp_path / "kept"))

    def made(name: str, gray: int) -> Path:
        for split in ("train", "test"):
            path = tmp_path / name / split / "cat" / "0.jpg"
            path.parent.mkdir(parents=True)
            Image.fromarray(np.full((32, 32, 3), gray, np.uint8)).save(path)
        return tmp_path / name

    return made


def test_each_folder_has_its_own_arrays(folder):
    dark, bright = folder("dark", 10), folder("bright", 200)
    for data, gray in ((dark, 10), (bright, 200), (dark, 10)):
        images, labels = cifar.load(data, "train")
        assert images.float().mean() == pytest.approx(gray, abs=2)
        torch.testing.assert_close(labels, torch.tensor([0]))
    with pytest.raises(FileNotFoundError):
        cifar.load(dark / "nothing", "train")


def test_a_training_of_another_length_leaves_the_record_alone(folder):
    call = runner.command(BENCHMARKS["threelc-epochs"])
    data = str(folder("dark", 10))
    shown = CliRunner().invoke(call, ["--data", data, "--minutes", "0", "--epochs", "5"], catch_exceptions=False)
    assert "accuracy" not in shown.output, "the table of the record"
