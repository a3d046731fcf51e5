"""Names of the entries of an AnnData, once for all facades."""

from __future__ import annotations

# obsm
SPATIAL = "spatial"
COMPONENTS = "X_pca"
NEIGHBORHOOD = "X_neighborhood"
FLOW = "flow"
# obsp
WEIGHTS = "potts_weights"
# obs
DOMAIN = "domain"  # in uns too, with all that is known about the fit
PATCH = "patch"
TRUTH = "truth"
CELL_TYPE = "cell_type"
SAMPLE = "sample"
# uns
N_DOMAINS = "n_domains"


def probability(key: str) -> str:
    """Return the name in obsm of the probabilities of all labels in ``obs[key]``."""
    return f"{key}_probability"


def entropy(key: str) -> str:
    """Return the name in obs of the uncertainty of the labels in ``obs[key]``."""
    return f"{key}_entropy"


def certainty(key: str) -> str:
    """Return the name in obs of the share of views that agree with the labels in ``obs[key]``."""
    return f"{key}_certainty"


def colors(key: str) -> str:
    """Return the name in uns of the colours of the labels in ``obs[key]``, as scanpy has it."""
    return f"{key}_colors"
