"""Slides and figures on disk: read with one clear message when it fails."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvi._anndata.checks import coordinates_of
from pdvi._base.atomic import check_writable

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


def check_figure(path: str | os.PathLike) -> Path:
    """As `check_writable`, with an ending that matplotlib can draw."""
    from matplotlib.backend_bases import FigureCanvasBase

    path = Path(path)
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in formats:
        msg = f"cannot draw {str(path)!r}: the ending must be one of {', '.join(formats)}."
        raise ValueError(msg)
    return check_writable(path)


def write_figure(axes: Any, path: str | os.PathLike, *, dpi: int = 150) -> None:
    """Write the figure of some axes, and close it."""
    import matplotlib.pyplot as plt
    import numpy as np

    figure = np.ravel(np.asarray(axes, dtype=object))[0].figure
    try:
        figure.savefig(path, dpi=dpi)
    finally:
        plt.close(figure)
