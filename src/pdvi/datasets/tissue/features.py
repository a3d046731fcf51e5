"""Draw features of the spots, without counts."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdvi._anndata.keys import COMPONENTS
from pdvi.datasets.tissue.cells import ENTRIES, LIGANDS, Block


class Features:
    """Collects features like principal components, without counts."""

    def __init__(self, n: int, n_features: int, mixtures: np.ndarray, n_samples: int, rng: np.random.Generator):
        spread = np.linspace(1.6, 0.3, n_features)
        n_domains, n_types = mixtures.shape
        tables = [rng.standard_normal((k, n_features)) * spread for k in (n_types, n_domains, n_samples, LIGANDS)]
        self.types, self.regional, self.batch, self.ligands = (table.astype(np.float32) for table in tables)
        self.batch[0] = 0
        self.X = np.empty((n, n_features), np.float32)
        self.rows = max(1, ENTRIES // n_features)

    def __call__(self, block: Block) -> None:
        """Draw the features of one block."""
        out = self.X[block.begin : block.begin + self.rows]
        block.rng.standard_normal(out=out, dtype=np.float32)
        out += block.cells @ self.types
        out += np.float32(0.3) * (self.regional[block.domain] + self.batch[block.sample])
        out += block.ligand @ self.ligands

    def parts(self) -> dict[str, Any]:
        """Return what AnnData takes."""
        return {"obsm": {COMPONENTS: self.X}}
