"""The report is one file that needs nothing else."""

import re

import matplotlib.pyplot as plt
import pytest

import pdvi
from pdvi import report
from test_pl import slide


@pytest.fixture
def adata():
    adata = slide(n_domains=4)
    adata.uns["domain_colors"] = pdvi.pl.palette(4)
    adata.uns["domain"] |= {"elbo": -1234.5, "params": {"n_domains": 4, "sample_key": "<b>", "recipe": {"rounds": 20}}}
    return adata


def test_a_report_holds_everything(adata, tmp_path):
    report.write(adata, tmp_path / "report.html", title="A & B")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count("src='data:image/png;base64,") == 4
    assert not re.search(r"(src|href)\s*=\s*['\"](?!data:)", text)
    assert "<h1>A &amp; B</h1>" in text
    assert "400 spots" in text
    assert "&lt;b&gt;" in text
    assert "ELBO -1,23" in text
    assert re.search(r"<details>.*recipe.*<td>rounds</td><td>20</td>.*</details>", text, re.DOTALL)
    assert not plt.get_fignums()


def test_an_empty_domain_and_samples_are_no_trouble(adata):
    adata.obs["domain"] = adata.obs["domain"].cat.set_categories(["1", "2", "3", "4"]).where(lambda d: d != "4", "3")
    text = report.page(adata, sample_key="slice")
    assert "<td>0</td><td>0.0 %</td><td>none</td>" in text
