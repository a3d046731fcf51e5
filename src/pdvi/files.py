"""Slides and figures on disk: read with one clear message when it fails, written whole or not at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvi.anndata_checks import coordinates_of

if TYPE_CHECKING:
    from anndata import AnnData


def read_slide(path: str | os.PathLike) -> AnnData:
    """Read an h5ad file, and check what can be checked before any work: spots, coordinates, unique gene names."""
    path = Path(path)
    if not path.exists():
        msg = f"no file at {str(path)!r}; give the path of an h5ad file."
        raise FileNotFoundError(msg)
    import h5py
    from anndata import read_h5ad

    if path.is_dir() or not h5py.is_hdf5(path):
        msg = f"{str(path)!r} is not an h5ad file; write one with adata.write_h5ad(path)."
        raise ValueError(msg)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about old formats, and names that are checked below
        try:
            adata = read_h5ad(path)
        except MemoryError:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            msg = f"{str(path)!r} is not an h5ad file, or it is damaged or truncated ({reason}); write it again."
            raise ValueError(msg) from error
    try:
        _check_slide(adata)
    except ValueError as error:
        msg = f"{str(path)!r}: {error}"
        raise ValueError(msg) from error
    return adata


def _check_slide(adata: AnnData) -> None:
    if adata.n_obs < 2:
        msg = f"a slide must have at least 2 spots, got {adata.n_obs}."
        raise ValueError(msg)
    if not adata.var_names.is_unique:
        names = adata.var_names[adata.var_names.duplicated()]
        msg = f"gene names must be unique, but {names[0]!r} is there twice; call adata.var_names_make_unique()."
        raise ValueError(msg)
    coordinates_of(adata)


def check_writable(path: str | os.PathLike) -> Path:
    """A path that a file can be written to: found out by trying, before any work is done."""
    path = Path(path)
    if path.is_dir():
        msg = f"cannot write {str(path)!r}: it is a directory; give a file name."
        raise ValueError(msg)
    if not path.parent.is_dir():
        msg = f"cannot write {str(path)!r}: the folder {str(path.parent)!r} does not exist; create it first."
        raise ValueError(msg)
    temporary = _temporary(path)
    try:
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        msg = f"cannot write {str(path)!r}: {error.strerror}; choose another place."
        raise ValueError(msg) from error
    return path


def check_figure(path: str | os.PathLike) -> Path:
    """As `check_writable`, with an ending that matplotlib can draw."""
    from matplotlib.backend_bases import FigureCanvasBase

    path = Path(path)
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in formats:
        msg = f"cannot draw {str(path)!r}: the ending must be one of {', '.join(formats)}."
        raise ValueError(msg)
    return check_writable(path)


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary name beside ``path``, which takes its place at the end; removed if something fails."""
    path = Path(path)
    temporary = _temporary(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_figure(axes: Any, path: str | os.PathLike, *, dpi: int = 150) -> None:
    """Write the figure of some axes, and close it."""
    import matplotlib.pyplot as plt
    import numpy as np

    figure = np.ravel(np.asarray(axes, dtype=object))[0].figure
    try:
        figure.savefig(path, dpi=dpi)
    finally:
        plt.close(figure)


def _temporary(path: Path) -> Path:
    """One name, so that a killed run leaves at most one; with the same ending, since that tells the format."""
    return path.with_name(f".tmp-{path.name}")
