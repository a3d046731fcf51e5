"""Slides that stay on disk: opened with their expression as it lies there, and written again with what was found."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import scipy.sparse as sp

from pdvi._anndata.blocks import MOST_ROWS, NUMBERS
from pdvi._anndata.keys import SPATIAL
from pdvi._anndata.read import check_slide
from pdvi._anndata.spatialdata import is_spatialdata, is_zarr, table_folder
from pdvi._base.atomic import check_writable, replacing, resolved
from pdvi._base.atomic_folder import begin_folder, settle_folder
from pdvi._base.checks import key_in
from pdvi._base.temporary import remove

if TYPE_CHECKING:
    from anndata import AnnData

ELEMENTS = {"X", "obs", "var", "obsm", "varm", "obsp", "varp", "layers", "uns", "raw"}  # of an AnnData in zarr
ELEMENTS |= {"zarr.json", ".zgroup", ".zattrs", ".zmetadata"}
HELD = 0.5e9, 3.0, 2_500  # bytes of a process, times the matrix, bytes of a spot: what domains take in memory


def open_lazily(path: Path, *, layer: str | None = None, spatial_key: str = SPATIAL) -> AnnData:
    """Return a slide in an h5ad file or a zarr folder whose expression stays there; of obsm it has the coordinates."""
    from anndata import AnnData
    from anndata.io import read_elem

    try:
        from anndata.experimental import read_elem_lazy
        from dask.array import Array
    except ImportError as error:
        msg = 'slides that stay on disk need dask; install it with: pip install "pdvi[dask]"'
        raise ImportError(msg) from error
    group = open_group(path)
    matrix = "X" if layer is None else f"layers/{layer}"
    if layer is not None:
        key_in(group.get("layers", {}), layer, "adata.layers", "name the layer with the counts, or none for adata.X")
    var = read_elem(group["var"])
    rows = int(np.clip(NUMBERS // max(1, len(var)), 1, MOST_ROWS))
    X: Array | None = None
    if matrix in group and len(var):
        X = read_elem_lazy(group[matrix], chunks=(rows, len(var)))
    coordinates = {spatial_key: read_elem(group["obsm"][spatial_key])} if spatial_key in group.get("obsm", {}) else {}
    uns = read_elem(group["uns"]) if "uns" in group else {}
    adata = AnnData(X, obs=read_elem(group["obs"]), var=var, obsm=coordinates, uns=dict(uns))
    return check_slide(adata, spatial_key, path)


def can_stay_on_disk(path: Path) -> bool:
    """Return whether a path is that of an h5ad file or a zarr folder (of a SpatialData store, its only table)."""
    import h5py

    if path.is_file():
        try:
            h5py.File(path).close()
        except OSError:  # no such file, or a damaged one
            return False
        return True
    return is_zarr(_slide_folder(path))


def bytes_in_memory(path: Path, layer: str | None = None) -> float:
    """Return about how much memory `tl.domains` would take for a slide that is read whole."""
    group = open_group(path)
    name = "X" if layer is None else f"layers/{layer}"
    if name not in group:
        return 0.0
    matrix = group[name]
    if str(matrix.attrs.get("encoding-type", "")).endswith("_matrix"):  # csr or csc
        n_rows, n_columns = matrix.attrs["shape"]
        size = float(matrix["data"].shape[0]) * (4 + matrix["indices"].dtype.itemsize)
    else:
        n_rows, n_columns = matrix.shape
        size = 4.0 * n_rows * n_columns
    return HELD[0] + HELD[1] * size + HELD[2] * float(n_rows)


def check_output(path: Path) -> Path:
    """Return ``path`` if a slide can be written there: a file, or with the ending .zarr a folder."""
    if path.suffix != ".zarr":
        return check_writable(path)
    if path.exists() and not is_zarr(path):
        msg = f"cannot write {str(path)!r}: it is there, and no zarr folder; give another name."
        raise ValueError(msg)
    foreign = sorted({entry.name for entry in path.iterdir()} - ELEMENTS) if path.exists() else []
    if foreign:  # of a SpatialData store, or put there by hand
        msg = f"cannot write {str(path)!r}: it has {foreign[0]!r}, which would be lost; give another name."
        raise ValueError(msg)
    check_writable(path.with_name(f"{path.name}.tmp"))
    return path


@contextmanager
def replacing_slide(path: Path) -> Iterator[Path]:
    """Give a name to write a slide to, a file or a folder, which takes the place of ``path`` at the end."""
    if path.suffix != ".zarr":
        with replacing(path) as temporary:
            yield temporary
        return
    target = resolved(path)
    temporary = begin_folder(target)
    try:
        yield temporary
        settle_folder(temporary, target, replace=True)
    finally:
        remove(temporary)


def write_with(found: AnnData, source: Path, target: Path) -> None:
    """Write the slide of ``source`` to ``target``, its matrices block by block, with obs, obsm and uns of ``found``."""
    from anndata.io import write_elem

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of zarr, about its next versions
        if source.is_dir() == target.is_dir():
            if source.is_dir():
                shutil.copytree(_slide_folder(source), target, dirs_exist_ok=True)
            else:
                shutil.copyfile(source, target)
            group = open_group(target, "r+")
        else:
            group = _copied_elements(open_group(source), target)
        write_elem(group, "obs", found.obs)
        for kind, entries in (("obsm", found.obsm), ("uns", found.uns)):
            for name in entries:
                write_elem(group, f"{kind}/{name}", entries[name])
        _close(group, target)


class SlideFile:
    """A new h5ad file or zarr folder: expression first, block of rows by block of rows, then all the rest."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if self.path.suffix == ".zarr":
            self.path.mkdir(exist_ok=True)
        self._group = open_group(self.path, "w")

    def __call__(self, block: sp.csr_matrix) -> None:
        """Append rows."""
        from anndata.io import sparse_dataset, write_elem

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of zarr, about its next versions
            if "X" in self._group:
                sparse_dataset(self._group["X"]).append(block)
            else:
                write_elem(self._group, "X", block)

    def finish(self, adata: AnnData) -> None:
        """Write all but the expression, and close the file."""
        from anndata.io import write_elem

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._group.attrs["encoding-type"], self._group.attrs["encoding-version"] = "anndata", "0.1.0"
            parts: dict[str, Any] = {"obs": adata.obs, "var": adata.var, "uns": dict(adata.uns)}
            parts |= {"obsm": dict(adata.obsm), "varm": {}, "obsp": {}, "varp": {}, "layers": {}}
            for name, part in parts.items():
                write_elem(self._group, name, part)
            _close(self._group, self.path)


def _copied_elements(source: Any, target: Path) -> Any:
    """Copy every element of a slide to a file of the other kind, matrices block by block."""
    from anndata import AnnData
    from anndata.experimental import read_elem_lazy
    from anndata.io import read_elem, write_elem

    group = open_group(target, "w")
    write_elem(group, "/", AnnData(obs=read_elem(source["obs"]), var=read_elem(source["var"])))
    whole = read_elem(source["uns"]) if "uns" in source else {}
    write_elem(group, "uns", whole)
    lazy = [name for name in ("X", "raw/X") if name in source]
    for kind in ("layers", "obsm", "varm", "obsp", "varp"):
        lazy += [f"{kind}/{name}" for name in source.get(kind, {})]
    for name in lazy:
        element = source[name]
        is_frame = element.attrs.get("encoding-type") == "dataframe"
        write_elem(group, name, read_elem(element) if is_frame else read_elem_lazy(element))
    return group


def open_group(path: Path, mode: Literal["r", "r+", "w"] = "r") -> Any:
    """Open an h5ad file or a zarr folder."""
    if not path.exists() and mode != "w":
        msg = f"no file at {str(path)!r}; give the path of an h5ad file or of a zarr folder."
        raise FileNotFoundError(msg)
    if path.is_dir():
        import zarr

        # what is consolidated cannot be changed; it is again at the end
        return zarr.open_group(_slide_folder(path), mode=mode, use_consolidated=False if mode == "r+" else None)
    import h5py

    return h5py.File(path, mode)


def _close(group: Any, target: Path) -> None:
    if target.is_dir():
        import zarr

        zarr.consolidate_metadata(group.store)
    else:
        group.close()


def _slide_folder(path: Path) -> Path:
    """The folder of a slide: of a SpatialData store that of its only table."""
    return table_folder(path) if is_spatialdata(path) else path
