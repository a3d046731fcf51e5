"""Slides that `pdvi domains` leaves on disk: when, where to, and with which executor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvi._anndata.lazy import bytes_in_memory, can_stay_on_disk, check_output
from pdvi._base.path_overlap import PathRole
from pdvi._base.work_dir import check_work_dir
from pdvi.core.executor import Executor
from pdvi.executors import Dask, Disk
from pdvi.executors.disk import parse_bytes
from pdvi.tl import files
from pdvi.tl.large import free_memory

if TYPE_CHECKING:
    from anndata import AnnData

    from pdvi._base.console import Say


def output_paths(slides: Sequence[Path], output: Path) -> list[Path]:
    """Return where every slide is written: to ``output``, or if there are several into that folder."""
    return [output] if len(slides) == 1 else [output / slide.name for slide in slides]


def written_slides(slides: Sequence[Path], output: Path) -> list[PathRole]:
    """Return every path that is written beside plots and reports: a slide for each input, and intermediate files."""
    outputs = zip(output_paths(slides, output), slides, strict=True)
    roles = [PathRole("--output", path, True, replaces=slide) for path, slide in outputs]
    return [*roles, PathRole("the folder of intermediate files", files.stages_of(output), True)]


@dataclass(frozen=True)
class LargeSlides:
    """Slides that are read in blocks, and where they are written with their domains."""

    slides: Sequence[Path]
    output: Path
    layer: str | None
    memory_limit: float
    executor: str | None
    scheduler: str | None

    @classmethod
    def of(
        cls,
        slides: Sequence[Path],
        output: Path,
        layer: str | None,
        memory_limit: str | None,
        executor: str | None,
        scheduler: str | None,
    ) -> LargeSlides | None:
        """Return the slides if they are to stay on disk: several, or one that would not fit; None otherwise."""
        if scheduler is not None and executor != "dask":
            msg = f"`--scheduler` is for --executor dask, got {executor!r}; give both."
            raise ValueError(msg)
        limit = free_memory() if memory_limit is None else parse_bytes(memory_limit)
        on_disk = all(slide.exists() and can_stay_on_disk(slide) for slide in slides)
        large = cls(slides, output, layer, limit, executor, scheduler)
        if len(slides) == 1 and executor is None:
            # what cannot be opened so is left to the reader of whole slides, which says what is wrong
            if not on_disk or bytes_in_memory(slides[0], layer) <= limit:
                return None
        elif not on_disk:
            wrong = next(slide for slide in slides if not (slide.exists() and can_stay_on_disk(slide)))
            msg = f"slides that stay on disk must be h5ad files or zarr folders, got {str(wrong)!r}; write it as such."
            raise ValueError(msg)
        check_work_dir(files.stages_of(output))
        if len(slides) > 1:
            output.mkdir(exist_ok=True)
            for path in output_paths(slides, output):
                check_output(path)
        return large

    def found(self, n_domains: int, say: Say, **settings: Any) -> AnnData:
        """Return the slides with their domains, without expression."""
        say(
            f"reading in blocks, within {self.memory_limit / 1e9:.1f} GB; "
            f"what is made on the way lies in {files.stages_of(self.output)}"
        )
        limits: dict[str, Any] = {"memory_limit": self.memory_limit, "layer": self.layer}
        place: Executor | None = None
        with ExitStack() as stack:
            if self.executor == "disk":
                place = Disk(self.memory_limit, scratch=files.stages_of(self.output), strict=False)
            elif self.executor == "dask":
                from distributed import Client

                options: dict[str, Any] = {} if self.scheduler else {"dashboard_address": None}
                place = Dask(stack.enter_context(Client(self.scheduler, **options)))
            return files.domains_on_disk(self.slides, n_domains, self.output, **limits, executor=place, **settings)
