"""Slides that `pdvi domains` leaves on disk: when, where to, and with which executor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
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


def output_paths(slides: Sequence[Path], output: Path) -> list[Path]:
    """Return where every slide is written: to ``output``, or if there are several into that folder."""
    return [output] if len(slides) == 1 else [output / slide.name for slide in slides]


def written_slides(slides: Sequence[Path], output: Path) -> list[PathRole]:
    """Return every path that is written beside plots and reports: a slide for each input, and intermediate files."""
    outputs = zip(output_paths(slides, output), slides, strict=True)
    roles = [PathRole("--output", path, True, replaces=slide) for path, slide in outputs]
    return [*roles, PathRole("the folder of intermediate files", files.stages_of(output), True)]


def limit_of_blocks(
    slides: Sequence[Path], output: Path, layer: str | None, memory_limit: str | None, executor: str | None
) -> float | None:
    """Return the bytes to stay within if slides are to stay on disk: several, or one that would not fit; else None."""
    limit = free_memory() if memory_limit is None else parse_bytes(memory_limit)
    wrong = [slide for slide in slides if not (slide.exists() and can_stay_on_disk(slide))]
    if len(slides) == 1 and executor is None:
        # what cannot be opened so is left to the reader of whole slides, which says what is wrong
        if wrong or bytes_in_memory(slides[0], layer) <= limit:
            return None
    elif wrong:
        msg = f"slides that stay on disk must be h5ad files or zarr folders, got {str(wrong[0])!r}; write it as such."
        raise ValueError(msg)
    check_work_dir(files.stages_of(output))
    if len(slides) > 1:
        output.mkdir(exist_ok=True)
        for path in output_paths(slides, output):
            check_output(path)
    return limit


def find_in_blocks(
    slides: Sequence[Path],
    n_domains: int,
    output: Path,
    *,
    limit: float,
    executor: str | None,
    scheduler: str | None,
    **settings: Any,
) -> AnnData:
    """Return slides that stay on disk with their domains, without expression."""
    place: Executor | None = None
    with ExitStack() as stack:
        if executor == "disk":
            place = Disk(limit, scratch=files.stages_of(output), strict=False)
        elif executor == "dask":
            from distributed import Client

            options: dict[str, Any] = {} if scheduler else {"dashboard_address": None}
            place = Dask(stack.enter_context(Client(scheduler, **options)))
        return files.domains_on_disk(slides, n_domains, output, memory_limit=limit, executor=place, **settings)
