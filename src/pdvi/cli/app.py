"""The command line: one thin function per command. What takes long to import is imported inside them."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdvi import __version__

if TYPE_CHECKING:
    from anndata import AnnData

    from pdvi._base.console import Say
    from pdvi._base.path_overlap import PathRole

app = typer.Typer(pretty_exceptions_enable=False)

INTERRUPTED = 130  # as a shell reports it

Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing unless something fails.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Tell more: settings, seconds, sizes.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, and nothing else.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same result.", min=0, max=2**32 - 1)]
SampleKey = Annotated[str | None, typer.Option(help="A column of obs that tells samples apart.")]
SpatialKey = Annotated[str, typer.Option(help="Coordinates in obsm.")]
Layer = Annotated[str | None, typer.Option(help="The layer with the counts; else X.")]
SLIDE = "An h5ad file, a Visium folder, or a SpatialData store"


def _show_version(asked: bool) -> None:
    if asked:
        print(f"pdvi {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)]


@app.callback()
def _options(version: Version = False, debug: Debug = False) -> None:
    """Spatial domains, and large-scale variational inference by primal-dual optimisation."""


@app.command()
def demo(
    n_spots: Annotated[int, typer.Option(help="Cells of the simulated tissue.")] = 10_000,
    n_domains: Annotated[int, typer.Option(help="Its domains.")] = 12,
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("pdvi-demo"),
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Simulate a tissue, find its domains, print how well k-means and pdvi did, and write figures and a report."""
    if out.exists() and not out.is_dir():
        msg = f"cannot write into {str(out)!r}: it is a file; give a folder with --out."
        raise ValueError(msg)
    with _working(quiet or as_json) as say:
        from pdvi.cli.demo import FILES, run

        _without_windows()
        rows = run(n_spots, n_domains, seed, out, say)
    if as_json:
        _print_json(written=[str(out / name) for name in FILES], methods=[row._asdict() for row in rows])
    elif not quiet:
        title = f"{n_spots:,} cells, {n_domains} domains: agreement with the truth"
        _print_table(("method", "ARI", "NMI", "seconds"), rows, title=title, digits=2)
        print(f"Written to {out}: {', '.join(FILES)}")


Place = StrEnum("Place", ["memory", "disk", "dask"])
OUTPUT = "Where to write the slide with its domains (h5ad, zarr); of several slides a folder."


@app.command()
def domains(
    slides: Annotated[list[Path], typer.Argument(help=f"{SLIDE}, with counts; several are samples of one analysis.")],
    output: Annotated[Path, typer.Option("--output", "--out", "-o", help=OUTPUT)],
    n_domains: Annotated[int, typer.Option(help="How many domains.", min=2)],
    plot: Annotated[Path | None, typer.Option(help="Where to draw a map (png, pdf, svg, ...).")] = None,
    report: Annotated[Path | None, typer.Option(help="Where to write an HTML report to explore.")] = None,
    sample_key: SampleKey = None,
    spatial_key: SpatialKey = "spatial",
    layer: Layer = None,
    key_added: Annotated[str, typer.Option(help="The column of obs that gets the domains.")] = "domain",
    beta: Annotated[float, typer.Option(help="Strength of the coupling between neighbours.", min=0)] = 1.0,
    views: Annotated[int | None, typer.Option(help="How many views; by default as many as time allows.", min=1)] = None,
    memory_limit: Annotated[str | None, typer.Option(help="Memory to stay within, such as 8GB.")] = None,
    executor: Annotated[Place | None, typer.Option(help="Where large slides are fitted.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask scheduler.")] = None,
    seed: Seed = 0,
    verbose: Verbose = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Find the spatial domains of a slide.

    A slide that would not fit into memory (or --memory-limit) is read in blocks. What is made on the way lies beside
    the output, in a folder that is removed at the end: a command that was interrupted goes on where it was.
    """
    with _working(quiet or as_json) as say:
        from pdvi import gr, pl, pp, tl
        from pdvi import report as reports
        from pdvi._anndata import lazy
        from pdvi._anndata import read as files
        from pdvi._base import atomic as paths
        from pdvi.cli.large import find_in_blocks, limit_of_blocks, output_paths, written_slides
        from pdvi.pl import figures
        from pdvi.tl import files as on_disk

        where: dict[str, Any] = {"sample_key": sample_key, "spatial_key": spatial_key}
        if len(slides) == 1:
            lazy.check_output(output)
        _check_paths(slides, written_slides(slides, output), {"--plot": plot, "--report": report})
        if scheduler is not None and executor != "dask":
            msg = f"`--scheduler` is for --executor dask, got {executor!r}; give both."
            raise ValueError(msg)
        limit = limit_of_blocks(slides, output, layer, memory_limit, executor)
        if plot is not None:
            figures.check_figure(plot)
        if report is not None:
            paths.check_writable(report)
        shown = ", ".join(map(str, slides))
        say(f"reading {shown}")
        settings: dict[str, Any] = {"views": views, "beta": beta, "key_added": key_added, "seed": seed}
        if limit is not None:
            stages = on_disk.stages_of(output)
            say(f"reading in blocks, within {limit / 1e9:.1f} GB; what is made on the way lies in {stages}")
            settings |= {"limit": limit, "layer": layer, "executor": executor, "scheduler": scheduler}
            adata = find_in_blocks(slides, n_domains, output, **where, **settings)
            where["sample_key"] = adata.uns[key_added]["params"]["sample_key"] or None
        else:
            adata = files.read_slide(slides[0], spatial_key=spatial_key)
            say(f"finding {n_domains} domains in {adata.n_obs:,} spots, {adata.n_vars:,} genes")
            try:
                if layer is not None:  # what is there may have been made from X
                    pp.prepare(adata, layer=layer)
                    pp.neighborhood(adata, **where)
                    gr.knn_graph(adata, **where)
                tl.domains(adata, n_domains, **where, **settings)
            except ValueError as error:
                msg = f"{shown!r}: {error}"
                raise ValueError(msg) from error
        found = adata.uns[key_added]
        say(found["status"])
        if verbose:
            for line in _details(adata, key_added):
                say(line)
        if plot is not None or report is not None:
            _without_windows()
        with _not_halfway() as undisturbed, ExitStack() as stack:  # all files take their names at the end, or none does
            outputs = output_paths(slides, output)
            places = {path: stack.enter_context(lazy.replacing_slide(path)) for path in outputs}
            places |= {path: stack.enter_context(paths.replacing(path)) for path in (plot, report) if path}
            say(f"writing {', '.join(str(path) for path in places)}")
            if limit is not None:
                on_disk.write_found(adata, slides, [places[path] for path in outputs])
            elif places[output].is_dir():
                adata.write_zarr(places[output])
            else:
                adata.write_h5ad(places[output])
            if plot is not None:
                figures.write_figure(pl.domains(adata, key=key_added, **where), places[plot])
            if report is not None:
                command = shlex.join(["pdvi", *sys.argv[1:]]) if sys.argv[1:2] == ["domains"] else None
                title = slides[0].name if len(slides) == 1 else output.name
                page = {"key": key_added, "layer": layer, "title": title, "command": command}
                reports.write(adata, places[report], **where, **page)
            undisturbed()  # all is written: a Ctrl-C between two names would leave half of the files
        if limit is not None:
            on_disk.forget(output)
        say("done")
    if as_json:
        sizes = adata.obs[key_added].value_counts(sort=False)
        _print_json(
            written=[str(path) for path in places],
            n_spots=adata.n_obs,
            n_genes=adata.n_vars,
            status=found["status"],
            elbo=found["elbo"],
            seconds=found.get("seconds"),
            domains={str(name): int(size) for name, size in sizes.items()},
        )


@app.command()
def choose(
    slide: Annotated[Path, typer.Argument(help=f"{SLIDE}, with counts.")],
    least: Annotated[int, typer.Option("--from", help="The fewest domains to try.", min=2)] = 4,
    most: Annotated[int, typer.Option("--to", help="The most domains to try.", min=2)] = 12,
    plot: Annotated[Path | None, typer.Option(help="Where to draw the scores (png, pdf, svg, ...).")] = None,
    sample_key: SampleKey = None,
    spatial_key: SpatialKey = "spatial",
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Try several numbers of domains, print how well each describes held-out spots, and recommend one."""
    if most < least:
        msg = f"`--to` must be at least `--from`, got {most} and {least}."
        raise typer.BadParameter(msg)
    with _working(quiet or as_json) as say:
        from pdvi import pl, tl
        from pdvi._anndata import read as files
        from pdvi._base import atomic as paths
        from pdvi.pl import figures

        _check_paths([slide], [], {"--plot": plot})
        if plot is not None:
            figures.check_figure(plot)
        say(f"reading {slide}")
        adata = files.read_slide(slide, spatial_key=spatial_key)
        say(f"trying {least} to {most} domains on {adata.n_obs:,} spots")
        candidates = range(least, most + 1)
        try:
            best = tl.choose_n_domains(adata, candidates, sample_key=sample_key, spatial_key=spatial_key)
        except ValueError as error:
            msg = f"{str(slide)!r}: {error}"
            raise ValueError(msg) from error
        if plot is not None:
            _without_windows()
            with paths.replacing(plot) as temporary:
                figures.write_figure(pl.n_domains(adata), temporary)
    columns = {name: values for name, values in adata.uns["n_domains"].items() if name != "recommended"}
    if as_json:
        _print_json(recommended=best, **{name: values.tolist() for name, values in columns.items()})
    elif quiet:
        print(best)  # which is all that was asked
    else:
        _print_table([name.replace("_", " ") for name in columns], [*zip(*columns.values())])
        print(f"recommended: {best}")


@app.command()
def report(
    slide: Annotated[Path, typer.Argument(help="A slide that `pdvi domains` or `tl.domains` wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the HTML file.")] = Path("report.html"),
    key: Annotated[str, typer.Option(help="The column of obs with the domains.")] = "domain",
    sample_key: SampleKey = None,
    type_key: Annotated[str | None, typer.Option(help="A column of obs with cell types.")] = None,
    spatial_key: SpatialKey = "spatial",
    layer: Layer = None,
    title: Annotated[str | None, typer.Option(help="Of the page; else the name of the file.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a report of a slide whose domains were found: one HTML file with a map to explore."""
    with _working(quiet or as_json) as say:
        from pdvi import report as reports
        from pdvi._anndata import read as files
        from pdvi._base import atomic as paths

        _check_paths([slide], [], {"--output": output})
        paths.check_writable(output)
        say(f"reading {slide}")
        adata = files.read_slide(slide, spatial_key=spatial_key)
        say(f"writing {output}")
        where = {"key": key, "sample_key": sample_key, "type_key": type_key, "spatial_key": spatial_key}
        with paths.replacing(output) as temporary:
            reports.write(adata, temporary, **where, layer=layer, title=title or slide.name)
        say("done")
    if as_json:
        _print_json(written=[str(output)], n_spots=adata.n_obs, bytes=output.stat().st_size)


@app.command()
def simulate(
    output: Annotated[Path, typer.Argument(help="Where to write the slide: an h5ad file, or a folder *.zarr.")],
    n_spots: Annotated[int, typer.Option(help="Over all samples.")] = 20_000,
    n_genes: Annotated[int, typer.Option(help="Columns of the count matrix.")] = 500,
    n_domains: Annotated[int, typer.Option(help="Layers, regions and nuclei together.")] = 12,
    n_samples: Annotated[int, typer.Option(help="Slides of the same organ.")] = 1,
    cells_per_spot: Annotated[int, typer.Option(help="1: single cells; more: spots on a grid.")] = 1,
    features: Annotated[int | None, typer.Option(help="So many features instead of counts.")] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Simulate a tissue with counts, coordinates and known domains."""
    with _working(quiet) as say:
        from pdvi._anndata.lazy import check_output, replacing_slide
        from pdvi.datasets.tissue import tissue

        check_output(output)
        say(f"simulating {n_spots:,} spots, {n_domains} domains")
        shape = {"n_genes": n_genes, "n_domains": n_domains, "n_samples": n_samples}
        with replacing_slide(output) as temporary:  # counts are written as they are drawn
            tissue(n_spots, **shape, cells_per_spot=cells_per_spot, features=features, path=temporary, seed=seed)
        say("done")


Experiment = StrEnum("Experiment", ["quadratic", "mixture", "embryo"])


@app.command()
def reproduce(
    experiment: Annotated[Experiment, typer.Argument(help="Which of the paper's experiments.")],
    seeds: Annotated[int | None, typer.Option(help="Runs of every method (5; with --quick 2).", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for runs, tables and figures.")] = None,
    data: Annotated[Path | None, typer.Option(help="A MOSTA slide (h5ad) for embryo; else one is simulated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small data and few trials: minutes.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Repeat an experiment of the paper: traces, tables, figures, and its claims beside what came out.

    Runs are kept in the folder: a command that was interrupted goes on where it was.
    """
    out = Path("pdvi-reproduce") / (f"{experiment}-quick" if quick else experiment) if out is None else out
    if out.exists() and not out.is_dir():
        msg = f"cannot write into {str(out)!r}: it is a file; give a folder with --out."
        raise ValueError(msg)
    with _working(quiet) as say:
        from pdvi.reproduce import run

        _without_windows()
        claims = run(experiment, out, seeds=seeds, data=data, quick=quick, say=say)
        say("done", 1.0)
    if not quiet:
        rows = [(claim.claim, claim.measured, claim.verdict) for claim in claims]
        title = f"{experiment}: what the paper says, and what came out"
        _print_table(("claim", "measured", "verdict"), rows, title=title)
        print(f"Written to {out}: README.md, claims.json, traces.csv, tables, figures")


@app.command()
def info(as_json: Json = False, debug: Debug = False) -> None:
    """Print versions, devices and the compilation cache, for a bug report."""
    import platform

    import jax

    from pdvi._base.compiled import SWITCH, keep_compiled, kept_bytes
    from pdvi.report.sections import versions

    kept = keep_compiled()
    lines = {**versions(), "Python": platform.python_version(), "platform": platform.platform()}
    lines["devices"] = ", ".join(str(device) for device in jax.devices())
    size = "" if kept is None else f" ({kept_bytes(kept) / 1e6:.1f} MB; {SWITCH}=off turns it off)"
    lines["cache"] = f"none ({SWITCH} names a folder)" if kept is None else f"{kept}{size}"
    if as_json:
        _print_json(**lines)
        return
    for name, value in lines.items():
        print(f"{name:14} {value}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: with 0, with 2 for wrong usage, 130 if interrupted, or 1 and a line of cause and remedy.

    A traceback is shown only with --debug.
    """
    arguments = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    try:
        code = app(arguments, prog_name="pdvi", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        # click passes an interruption on as the cause of its own
        if not any(isinstance(each, KeyboardInterrupt) for each in (error, error.__cause__, error.__context__)):
            if "--debug" in arguments:
                raise
            print(f"pdvi: {_line(error)}", file=sys.stderr)
            sys.exit(2 if _is_usage(error) else 1)
        code = INTERRUPTED
    if code == INTERRUPTED:  # raised here, or told by typer, depending on its version
        print("pdvi: interrupted.", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _is_usage(error: BaseException) -> bool:
    """Whether the command line itself is wrong: an unknown option, a missing argument."""
    return hasattr(error, "format_message")  # click's; typer has a copy of it, or not, depending on its version


def _details(adata: AnnData, key: str) -> Iterator[str]:
    """What --verbose adds: the settings, where the time went, the sizes of the domains."""
    fit = adata.uns[key]
    settings = {name: value for name, value in fit["params"].items() if name != "config"}
    yield "settings: " + ", ".join(f"{name}={value}" for name, value in settings.items())
    yield "seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in fit["seconds"].items())
    yield f"ELBO {fit['elbo']:,.1f}"
    sizes = adata.obs[key].value_counts(sort=False)
    yield "spots: " + ", ".join(f"{name}: {size:,}" for name, size in sizes.items())


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "", digits: int = 3) -> None:
    """Print rows of texts and numbers; columns of numbers are aligned on the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None)
    for name, first in zip(columns, rows[0]):
        table.add_column(name, justify="left" if isinstance(first, str) else "right")
    for row in rows:
        table.add_row(*(f"{cell:,.{digits}f}" if isinstance(cell, float) else str(cell) for cell in row))
        if all(isinstance(cell, str) for cell in row):  # texts are wrapped, and need lines between them
            table.add_section()
    Console().print(table)


def _print_json(**values: Any) -> None:
    print(json.dumps(values))


def _line(error: Any) -> str:
    if _is_usage(error):
        return f"{_one_line(error.format_message())} See pdvi --help."
    if isinstance(error, MemoryError):
        return "not enough memory; use fewer spots or genes."
    if isinstance(error, ValueError | OSError):
        return _one_line(error)
    return f"unexpected {type(error).__name__}: {_one_line(error)}; run again with --debug and report what it prints."


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


@contextmanager
def _working(quiet: bool) -> Iterator[Say]:
    """Tell what is being done, and keep what is compiled for the next command."""
    from pdvi._base.compiled import keep_compiled
    from pdvi._base.console import progress
    from pdvi._base.telling import told_by

    keep_compiled()
    with progress(quiet=quiet) as say, told_by(say):
        yield say


@contextmanager
def _not_halfway() -> Iterator[Callable[[], object]]:
    """Give a function to be called when there is no way back: from then to the end Ctrl-C does nothing."""
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGINT, before)


def _check_paths(slides: Sequence[Path], written: Sequence[PathRole], others: dict[str, Path | None]) -> None:
    """Refuse outputs that are one file, or an input, before anything is read."""
    from pdvi._base.path_overlap import PathRole, check_no_overlap

    read = [PathRole("the input", slide) for slide in slides]
    check_no_overlap([*read, *written, *(PathRole(name, path, True) for name, path in others.items() if path)])


def _without_windows() -> None:
    import matplotlib

    matplotlib.use("Agg")  # also where a display is named that is not there
