"""Work in stages that a killed process need not repeat: arrays in a folder, and a manifest of those that are whole.

A stage counts once the manifest names it, with the size and checksum of each of its files. So a process may be killed
at any moment, and the next goes on with the first stage that is not there.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pdvi._base.atomic import replacing, sync
from pdvi._base.memory import give_back
from pdvi._base.telling import tell
from pdvi._base.work_dir import WorkDir

MANIFEST, ENDING = "stages.json", ".npy"
PIECE = 2**24  # bytes of a file that are in memory at once

Made = dict[str, np.ndarray]


class Draft:
    """The files of a stage that is being made."""

    def __init__(self, folder: WorkDir, stage: str):
        self._folder, self._stage = folder, stage
        self.files: dict[str, Path] = {}

    def __setitem__(self, name: str, values: Any) -> None:
        np.save(self._new(name), np.asarray(values))

    def array(self, name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Return an array in a file, to be filled."""
        return np.lib.format.open_memmap(self._new(name), "w+", dtype, shape)

    @contextmanager
    def written(self, name: str, dtype: Any, shape: tuple[int, ...]) -> Iterator[Any]:
        """Give a file that takes the numbers of an array from first to last; mapped, they would count as memory."""
        with open(self._new(name), "wb") as file:
            about = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, about)
            yield file

    def _new(self, name: str) -> Path:
        self.files[name] = self._folder.new_file(_file_name(self._stage, name))
        return self.files[name]


class Stages:
    """A folder of finished stages of one piece of work, which ``work`` names; what another work left is removed."""

    def __init__(self, folder: WorkDir, work: str):
        self.folder, self._work = folder, work
        self._stages: dict[str, dict[str, list[int]]] = self._found()
        self._checked: set[str] = set()
        self.found = tuple(self._stages)  # those that were there: the work goes on
        if not self._stages:
            self._remove(lambda name: name.endswith(ENDING))

    def __call__(self, stage: str, make: Callable[[Draft], None]) -> Made:
        """Return the arrays of a stage, memory-mapped; ``make`` fills a draft of them where they are not there."""
        if not self._is_whole(stage):
            self._remove(lambda name: name.startswith(f"{stage}.") and name.endswith(ENDING))
            tell(stage)
            draft = Draft(self.folder, stage)
            make(draft)
            give_back()
            for file in draft.files.values():
                sync(file)
            self._stages[stage] = {name: _signature(file) for name, file in draft.files.items()}
            self._checked.add(stage)
            self._note()
        return self.load(stage)

    def load(self, stage: str) -> Made:
        """Return the arrays of a stage that is there, memory-mapped; nothing of them is in memory yet."""
        return {name: np.load(self._file(stage, name), mmap_mode="r") for name in self._stages[stage]}

    def forget(self, *stages: str) -> None:
        """Remove stages that nothing will ask for again."""
        for stage in stages:
            if stage in self._stages:
                names = self._stages.pop(stage)
                self._note()
                for name in names:
                    self.folder.remove(_file_name(stage, name))

    def _remove(self, is_old: Callable[[str], bool]) -> None:
        for name in self.folder.names():
            if is_old(name):
                self.folder.remove(name)

    def _file(self, stage: str, name: str) -> Path:
        return self.folder.path / _file_name(stage, name)

    def _is_whole(self, stage: str) -> bool:
        if stage in self._checked:
            return True
        files = self._stages.get(stage)
        if files is None or any(_signature(self._file(stage, name)) != is_ for name, is_ in files.items()):
            return False
        self._checked.add(stage)
        return True

    def _found(self) -> dict[str, dict[str, list[int]]]:
        try:
            noted = json.loads((self.folder.path / MANIFEST).read_text())
            return noted["stages"] if noted["work"] == self._work else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}  # nothing, or nothing that can be trusted

    def _note(self) -> None:
        with replacing(self.folder.file(MANIFEST)) as temporary:
            temporary.write_text(json.dumps({"work": self._work, "stages": self._stages}))


def _file_name(stage: str, name: str) -> str:
    return f"{stage}.{name}{ENDING}"


def _signature(file: Path) -> list[int]:
    """The size and the checksum of a file; nothing that a file can have if there is none."""
    checksum = 0
    try:
        with open(file, "rb", buffering=0) as stream:
            while piece := stream.read(PIECE):
                checksum = zlib.crc32(piece, checksum)
            return [os.fstat(stream.fileno()).st_size, checksum]
    except OSError:
        return [-1, 0]
