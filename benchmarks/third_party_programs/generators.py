"""Small data in the formats that the programs read. Everything is generated; nothing is downloaded."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

Generator = Callable[[Path], None]
"""Writes the data of a program; its argument is the folder in which the program runs."""


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def no_data(folder: Path) -> None:
    """For programs that make their data themselves."""


def mnist(at: str, train: int = 512, test: int = 1000) -> Generator:
    def write(folder: Path) -> None:
        raw = folder / at / "MNIST" / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        for name, count in (("train", train), ("t10k", test)):
            images, labels = digits(count)
            (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + images)
            (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels)

    return write


def digits(count: int) -> tuple[bytes, bytes]:
    """A bright square on noise; the class is its place."""
    random = rng()
    labels = random.integers(0, 10, count).astype(np.uint8)
    images = random.integers(0, 60, (count, 28, 28)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        row, column = 4 + 12 * (int(label) // 5), 2 + 5 * (int(label) % 5)
        image[row : row + 8, column : column + 4] = 220
    return images.tobytes(), labels.tobytes()


def cifar10(*places: str, count: int = 64) -> Generator:
    def write(folder: Path) -> None:
        random = rng()
        for at in places:
            base = folder / at / "cifar-10-batches-py"
            base.mkdir(parents=True, exist_ok=True)
            for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
                number = count // 5 if name != "test_batch" else count // 4
                labels = random.integers(0, 10, number).tolist()
                images = random.integers(0, 256, (number, 3072)).astype(np.uint8)
                (base / name).write_bytes(pickle.dumps({"data": images, "labels": labels}))
            (base / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))

    return write


def small_graphs(name: str, count: int = 60) -> Generator:
    """Rings of four to seven nodes in the format of the graph kernel data sets; the class is drawn."""

    def write(folder: Path) -> None:
        random, lines = rng(), [str(count)]
        for number in range(count):
            size = int(random.integers(4, 8))
            lines.append(f"{size} {number % 2}")
            lines += [f"{random.integers(0, 3)} 2 {(i + 1) % size} {(i - 1) % size}" for i in range(size)]
        (folder / "dataset" / name).mkdir(parents=True, exist_ok=True)
        (folder / "dataset" / name / f"{name}.txt").write_text("\n".join(lines) + "\n")

    return write


def images(*folders: str, count: int = 12, size: int = 64) -> Generator:
    """Pictures in folders, one folder for each class."""

    def write(folder: Path) -> None:
        from PIL import Image  # type: ignore[import-not-found,unused-ignore]

        random = rng()
        for at in folders:
            (folder / at).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = random.integers(0, 256, (size, size, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / at / f"{i:03d}.png")

    return write


def carvana(count: int = 12, size: int = 64) -> Generator:
    """Pictures and their masks."""

    def write(folder: Path) -> None:
        from PIL import Image

        images("data/imgs", count=count, size=size)(folder)
        (folder / "data" / "masks").mkdir(parents=True, exist_ok=True)
        for i in range(count):
            mask = np.zeros((size, size), dtype=np.uint8)
            mask[10 : 20 + i, 10 : 20 + i] = 1
            Image.fromarray(mask).save(folder / "data" / "masks" / f"{i:03d}_mask.png")

    return write


WORDS = [
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "is",
    "was",
    "he",
    "for",
    "it",
    "with",
    "as",
    "on",
    "be",
    "at",
    "by",
    "not",
]


def words(*files: str, lines: int = 400) -> Generator:
    """Sentences of ten words each."""

    def write(folder: Path) -> None:
        random = rng()
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            text = "".join(" ".join(random.choice(WORDS, 10)) + "\n" for _ in range(lines))
            (folder / file).write_text(text)

    return write


def names(file: str, count: int = 400) -> Generator:
    """One short made-up name a line."""

    def write(folder: Path) -> None:
        random = rng()
        letters = list("abcdefghijklmnop")
        (folder / file).write_text(
            "\n".join("".join(random.choice(letters, random.integers(2, 9))) for _ in range(count))
        )

    return write


def tokens(at: str, vocabulary: int = 40, count: int = 4000) -> Generator:
    """Token numbers in the format of nanoGPT."""

    def write(folder: Path) -> None:
        (folder / at).mkdir(parents=True, exist_ok=True)
        for name in ("train", "val"):
            rng().integers(0, vocabulary, count).astype(np.uint16).tofile(folder / at / f"{name}.bin")
        (folder / at / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocabulary}))

    return write


def cora(at: str, nodes: int = 1700, features: int = 40, bad: dict[int, str] | None = None) -> Generator:
    """A citation graph. ``bad`` gives the first feature of some nodes, as text."""

    def write(folder: Path) -> None:
        random = rng()
        (folder / at).mkdir(parents=True, exist_ok=True)
        rows = []
        for node in range(nodes):
            values = [str(v) for v in random.integers(0, 2, features)]
            values[0] = (bad or {}).get(node, "1")
            rows.append("\t".join([str(1000 + node), *values, f"class{node % 7}"]))
        (folder / at / "cora.content").write_text("\n".join(rows) + "\n")
        edges = random.integers(0, nodes, (3 * nodes, 2)) + 1000
        (folder / at / "cora.cites").write_text("\n".join(f"{a}\t{b}" for a, b in edges) + "\n")

    return write


def sines(file: str, rows: int = 8, length: int = 60, bad: tuple[int, int] | None = None) -> Generator:
    """Waves in a NumPy array, saved by torch."""

    def write(folder: Path) -> None:
        import torch

        waves = np.sin((np.arange(length) + rng().integers(0, 80, (rows, 1))) / 20.0)
        if bad is not None:
            waves[bad] = np.nan
        torch.save(waves, folder / file)

    return write


def power(at: str, rows: int = 1000, bad: tuple[int, int, float] | None = None) -> Generator:
    """A table of measurements."""

    def write(folder: Path) -> None:
        (folder / at).mkdir(parents=True, exist_ok=True)
        table = rng().normal(size=(rows, 8))
        if bad is not None:
            table[bad[:2]] = bad[2]
        np.save(folder / at / "data.npy", table)

    return write


def music(file: str, pieces: int = 30, bad: tuple[int, int, int] | None = None) -> Generator:
    """Piano rolls in a MATLAB file; ``bad`` is the place of a NaN in the training set."""

    def write(folder: Path) -> None:
        from scipy.io import savemat  # type: ignore[import-untyped]

        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        random = rng()
        sets = {}
        for name, count in (("traindata", pieces), ("validdata", 5), ("testdata", 5)):
            rolls = np.empty((1, count), dtype=object)
            for i in range(count):
                rolls[0, i] = (random.random((30, 88)) < 0.06).astype(np.float64)
            sets[name] = rolls
        if bad is not None:
            sets["traindata"][0, bad[0]][bad[1], bad[2]] = np.nan
        savemat(folder / file, sets)

    return write
