"""Lines about stages that last, for whoever waits."""

import threading
from contextvars import copy_context

import pytest

import pdvi
from pdvi._base import telling


class Lines(list):
    """Lines that are written by other threads, to be waited for."""

    def __init__(self):
        super().__init__()
        self.came = threading.Event()

    def __call__(self, line):
        self.append(line)
        self.came.set()


class Chatty(telling.Teller):
    """Tells every stage at once."""

    def __call__(self, stage, done=None):
        self._write(stage)


def test_a_stage_that_lasts_is_told_and_one_that_does_not_is_not(monkeypatch):
    lines = Lines()
    monkeypatch.setattr(telling, "PATIENCE", 0.2)
    with telling.told_by(lines):
        telling.tell("short")
        telling.tell("long", 0.5)
        assert lines.came.wait(10)
        telling.tell("short too")
    assert len(lines) == 1
    assert lines[0].startswith("long (about ")
    assert lines[0].endswith(" s left)")


def test_the_first_listener_hears_what_other_threads_tell(monkeypatch):
    monkeypatch.setattr(telling, "Teller", Chatty)
    outer, inner = Lines(), Lines()
    with telling.told_by(outer), telling.told_by(inner):
        thread = threading.Thread(target=copy_context().run, args=(telling.tell, "elsewhere"))
        thread.start()
        thread.join()
    assert (outer, inner) == (["elsewhere"], [])


@pytest.mark.filterwarnings("ignore:made what was missing")
def test_domains_tell_their_stages_when_asked(monkeypatch, capfd):
    monkeypatch.setattr(telling, "Teller", Chatty)
    for progress in (None, True):  # by default on a terminal only
        adata = pdvi.datasets.tissue(300, n_genes=20, n_domains=3, seed=0)
        pdvi.tl.domains(adata, 3, views=2, progress=progress)
        told = capfd.readouterr().err
        assert bool(told) == (progress is True)
    for stage in ("spatial components", "the graph", "view 2 of 2: types of 30 neighbors"):
        assert stage in told


def test_the_last_stage_of_a_call_is_over_with_it(monkeypatch):
    lines = Lines()
    monkeypatch.setattr(telling, "PATIENCE", 0.2)
    with telling.told_by(lines):
        with telling.told(None):
            telling.tell("the last")
        assert not lines.came.wait(0.6)


def test_where_nobody_listens_nothing_is_written(monkeypatch, capfd):
    monkeypatch.setattr(telling, "Teller", Chatty)
    telling.tell("into the void")
    with telling.told(False):
        telling.tell("into the void")
    assert capfd.readouterr() == ("", "")
