"""Domains of slides that stay on disk: one, or several as samples of one analysis, each read on its own."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from pdvi._anndata import keys
from pdvi._anndata.checks import say
from pdvi._anndata.lazy import open_lazily, write_with
from pdvi._base.atomic import replacing
from pdvi._base.work_dir import WorkDir
from pdvi.tl.domains import domains

if TYPE_CHECKING:
    from anndata import AnnData

STAGES = ".stages"  # the ending of the folder beside the output
FILE = "file"  # the column of obs that tells slides of several files apart


def domains_on_disk(
    slides: Sequence[Path],
    n_domains: int,
    output: Path,
    *,
    layer: str | None = None,
    sample_key: str | None = None,
    spatial_key: str = keys.SPATIAL,
    key_added: str = keys.DOMAIN,
    memory_limit: str | float | None = None,
    executor: Any = None,
    **settings: Any,
) -> AnnData:
    """Find the domains of slides, whose expression is read in blocks; return all but the expression.

    What is made on the way, and what was found, lies in a folder beside ``output`` until `write_found` is done: the
    same call goes on with it. Other ``settings`` are those of `tl.domains`. Several slides are samples.
    """
    folder = WorkDir(stages_of(output))
    opened = [open_lazily(slide, layer=layer, spatial_key=spatial_key) for slide in slides]
    adata = opened[0] if len(opened) == 1 else together(opened, slides, sample_key)
    sample_key = FILE if len(opened) > 1 else sample_key
    where: dict[str, Any] = {"sample_key": sample_key, "spatial_key": spatial_key, "key_added": key_added}
    asked = {"n_domains": n_domains, "layer": layer, **where, **settings}
    kept = folder.file(f"found-{_mark(slides, asked)}.h5ad")
    if not kept.exists():
        limits: dict[str, Any] = {"memory_limit": memory_limit, "executor": executor}
        domains(adata, n_domains, **where, **settings, **limits, stages=folder.path)
        with replacing(kept) as temporary:
            _found_in(adata, key_added).write_h5ad(temporary)
        return adata
    from anndata import read_h5ad

    say(f"the domains are in {str(folder.path)!r} already.")
    found = read_h5ad(kept)
    for name in found.obs:
        adata.obs[name] = found.obs[name]
    adata.obsm.update(found.obsm)
    adata.uns.update(found.uns)
    return adata


def write_found(adata: AnnData, slides: Sequence[Path], targets: Sequence[Path]) -> None:
    """Write every slide to its target with what was found for its spots."""
    begin = 0
    for slide, target in zip(slides, targets, strict=True):
        size = len(open_lazily(slide).obs) if len(slides) > 1 else adata.n_obs
        write_with(adata[begin : begin + size] if len(slides) > 1 else adata, slide, target)
        begin += size


def stages_of(output: Path) -> Path:
    """Return the folder beside an output in which the work on it is kept."""
    return output.with_name(output.name + STAGES)


def forget(output: Path) -> None:
    """Remove what was kept: the output is whole."""
    WorkDir(stages_of(output)).remove_all()


def together(slides: Sequence[AnnData], paths: Sequence[Path], sample_key: str | None) -> AnnData:
    """Return slides one below the other, with the genes that all have; ``obs["file"]`` tells them apart."""
    import anndata

    if sample_key is not None:
        msg = f"`sample_key` must be left out for several files, which are the samples, got {sample_key!r}."
        raise ValueError(msg)
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        msg = f"slides of one analysis must have different names, got {names}; rename one."
        raise ValueError(msg)
    joined = anndata.concat(slides, join="inner", label=FILE, keys=names, index_unique="-", uns_merge=None)
    if not joined.n_vars:
        msg = f"slides of one analysis must share genes, but no gene is in all of {names}; use the same names."
        raise ValueError(msg)
    return joined


def _found_in(adata: AnnData, key: str) -> AnnData:
    """What `tl.domains` has added to a slide, without its expression."""
    from anndata import AnnData

    obsm = [keys.probability(key), keys.posterior(key), keys.SPATIAL_COMPONENTS]
    return AnnData(
        obs=pd.DataFrame(adata.obs[[key, keys.certainty(key), keys.entropy(key)]]),
        obsm={name: np.asarray(adata.obsm[name]) for name in obsm},
        uns={name: adata.uns[name] for name in (key, keys.colors(key), keys.SPATIAL_COMPONENTS)},
    )


def _mark(slides: Sequence[Path], asked: dict[str, Any]) -> str:
    """A name for a question: which slides, as they are now, and what is asked."""
    stats = [(str(path.resolve()), os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in slides]
    return hashlib.sha256(json.dumps([stats, asked], sort_keys=True, default=str).encode()).hexdigest()[:16]
