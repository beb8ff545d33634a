"""One self-contained page: the figures and plots of one or more result files."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import jaxserve
from jaxserve.bench.tables import COMPARED

mpl.use("svg")

_COLOURS = {
    "#0b8a7d": "decode",
    "#c2660c": "chunk",
    "#7c3aed": "shared",
    "#b3261e": "bad",
    "#5f84c4": "cached",
    "#565d70": "soft",
    "#000000": "ink",
}
"""Colours of the figures, and the variables of `theme.css` that take their places."""

_THEME = Path(jaxserve.__file__).with_name("theme.css")

mpl.rcParams.update(
    {
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "axes.prop_cycle": cycler(color=list(_COLOURS)[:-1]),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "legend.facecolor": "none",
        "legend.edgecolor": "none",
    }
)

_LOST = "lost"

_PAGE = jinja2.Environment(autoescape=True).from_string("""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>jaxserve bench</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
{{ theme | safe }}
body { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 3rem }
h1 { margin: 0; letter-spacing: -.02em } .card { margin: 1rem 0 }
.card > h2 { font-size: 1.15rem } .scroll { overflow-x: auto }
table { margin: .8rem 0; font-size: .92rem } svg { max-width: 100%; height: auto }
svg text { font-family: var(--sans) !important; fill: var(--ink) } figure { margin: 1rem 0 0 }
</style>
<h1>jaxserve bench</h1>
<p class="soft">Latencies count from the time at which each request was meant to be sent. Requests
that were refused, failed, timed out or did not finish are misses in every percentage.</p>
{% if overview %}<section class="card"><h2>Overview</h2>
{% for figure in overview %}<figure>{{ figure | safe }}</figure>{% endfor %}</section>{% endif %}
{% for point in points %}
<section class="card">
<h2>{{ point.title }}</h2>
<p class="soft">{{ point.about }}</p>
{% for error in point.errors %}
<p class="warning">{{ error.count }} requests: {{ error.example }}</p>
{% endfor %}{% for warning in point.warnings %}<p class="warning">{{ warning }}</p>{% endfor %}
<div class="scroll">
<table><tr><th></th>{% for name in point.columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in point.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</table></div>
{% for figure in point.figures %}<figure>{{ figure | safe }}</figure>{% endfor %}
</section>
{% endfor %}
</html>
""")


def page(documents: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """HTML of all points of (name, result document) pairs."""
    points = [
        (f"{name}: {point['name']}" if len(documents) > 1 else point["name"], point)
        for name, document in documents
        for point in document["points"]
    ]
    overview = [_goodput(points), _matrix(points)] if len(points) > 1 else []
    return _PAGE.render(
        theme=_THEME.read_text(encoding="utf-8"),
        overview=overview,
        points=[_section(title, point) for title, point in points],
    )


def _section(title: str, point: dict[str, Any]) -> dict[str, Any]:
    figures = point["summary"]
    columns = {"all": figures["total"], **figures["classes"]}
    rows = [
        [label, *(_cell(each, keys, form) for each in columns.values())]
        for label, keys, form in (("sent", ("sent",), "{:d}"), *COMPARED)
    ]
    settings = point["settings"]
    window = figures["window"]
    return {
        "title": title,
        "about": f"{settings['model']} at {settings['url']}; figures of the requests meant to be "
        f"sent from {window['start_s']:g} to {window['end_s']:g} s.",
        "errors": point.get("errors", ()),
        "warnings": point["warnings"],
        "columns": list(columns),
        "rows": rows,
        "figures": [_lengths(point), _latencies(point), *_timeline(point)],
    }


def _cell(figures: dict[str, Any], keys: Sequence[str], form: str) -> str:
    value: Any = figures
    for key in keys:
        value = value[key]
    if value is None:
        return _LOST if keys[0] == "ttft_ms" else "-"
    return form.format(value)


def _svg(width: float, height: float, draw: Callable[[Figure], None]) -> str:
    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    for colour, name in _COLOURS.items():
        text = text.replace(f": {colour}", f": var(--{name})")
    return text[text.index("<svg") :]


def _classes(point: dict[str, Any]) -> list[str]:
    return list(point["summary"]["classes"])


def _lengths(point: dict[str, Any]) -> str:
    """Prompt and output tokens of each request. Crosses: lost requests, at the requested output."""

    def draw(figure: Figure) -> None:
        axes: Axes = figure.subplots()
        for number, name in enumerate(_classes(point)):
            mine = [r for r in point["requests"] if r["traffic_class"] == name]
            done = [r for r in mine if r["outcome"] == "completed"]
            lost = [r for r in mine if r["outcome"] != "completed"]
            axes.scatter(
                [r["prompt_tokens"] for r in done],
                [r["output_tokens"] for r in done],
                s=10,
                color=f"C{number}",
                alpha=0.6,
                label=f"{name}: {len(done)} completed, {len(lost)} lost",
            )
            axes.scatter(
                [r["prompt_tokens"] for r in lost],
                [r["max_tokens"] for r in lost],
                s=18,
                color=f"C{number}",
                marker="x",
            )
        axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="output tokens")
        axes.legend(fontsize=8)

    return _svg(7, 3.6, draw)


def _latencies(point: dict[str, Any]) -> str:
    """Share of *all* requests served within a time: a class that loses some never reaches 100 %."""

    def draw(figure: Figure) -> None:
        for axes, key, label in zip(
            figure.subplots(1, 2, sharey=True), ("ttft", "e2e"), ("TTFT", "end to end"), strict=True
        ):
            for number, name in enumerate(_classes(point)):
                mine = [r for r in point["requests"] if r["traffic_class"] == name]
                times = sorted(r[key] for r in mine if r["outcome"] == "completed")
                shares = [(index + 1) / len(mine) for index in range(len(times))]
                axes.step(times, shares, where="post", color=f"C{number}", label=name)
            axes.set(xlabel=f"{label}, s from the intended send time", xscale="log", ylim=(0, 1.02))
            axes.legend(fontsize=8)
        figure.supylabel("share of all requests", fontsize=9)

    return _svg(8, 3.2, draw)


def _timeline(point: dict[str, Any]) -> list[str]:
    """Running, waiting and KV cache use as the server reported them; nothing if it did not."""
    samples = [s for s in point["server_metrics"] if "running" in s]
    if not samples:
        return []

    def draw(figure: Figure) -> None:
        axes: Axes = figure.subplots()
        times = [s["time"] for s in samples]
        axes.plot(times, [s["running"] for s in samples], label="running")
        axes.plot(times, [s.get("waiting", 0) for s in samples], label="waiting")
        axes.set(xlabel="seconds", ylabel="requests")
        axes.legend(loc="upper left", fontsize=8)
        usage = axes.twinx()
        usage.plot(times, [100 * s.get("kv_usage", 0) for s in samples], color="C3", ls=":")
        usage.set(ylabel="KV cache used, % (dotted)", ylim=(0, 105))
        usage.grid(visible=False)

    return [_svg(8, 3, draw)]


def _goodput(points: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Throughput against goodput: all served requests, and those served in time."""

    def draw(figure: Figure) -> None:
        axes: Axes = figure.subplots()
        for title, point in points:
            total = point["summary"]["total"]
            x, y = total["output_tokens_per_s"], total["goodput_tokens_per_s"]
            axes.scatter([x], [y])
            axes.annotate(title, (x, y), fontsize=8, xytext=(4, 4), textcoords="offset points")
        top = max(p["summary"]["total"]["output_tokens_per_s"] for _, p in points) * 1.05 or 1
        axes.plot([0, top], [0, top], color="gray", lw=0.8, ls="--")
        axes.set(xlabel="output tok/s", ylabel="goodput tok/s (SLO met)")

    return _svg(6, 3.6, draw)


def _matrix(points: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """SLO attainment of every class in every configuration."""
    names = sorted({name for _, point in points for name in _classes(point)})

    def share(point: dict[str, Any], name: str) -> float:
        found = point["summary"]["classes"].get(name, {}).get("slo_attainment")
        return float("nan") if found is None else 100 * found

    def draw(figure: Figure) -> None:
        axes: Axes = figure.subplots()
        values = [[share(point, name) for name in names] for _, point in points]
        axes.imshow(values, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
        axes.set_xticks(range(len(names)), names)
        axes.set_yticks(range(len(points)), [title for title, _ in points])
        axes.grid(visible=False)
        for row, shares in enumerate(values):
            for column, value in enumerate(shares):
                text = "-" if value != value else f"{value:.0f} %"
                axes.text(column, row, text, ha="center", va="center", fontsize=9, color="#101010")
        axes.set_title("requests within their SLO, of all sent", fontsize=9)

    return _svg(7, 1.2 + 0.4 * len(points), draw)
