"""Records the dashboard and the benchmark's report of a real run on this machine's CPU.

    python scripts/record_dashboard.py

The script serves the embedded model, puts load on it with `jaxserve bench`, and evaluates every
query of deploy/grafana-dashboard.json with a Prometheus that scrapes the server. It writes

- docs/measurements/dashboard_cpu.json: the panels' lines, which `plot_figures.py` draws;
- docs/figures/bench_report.png: a screenshot of the report.

Needs the programs prometheus and chromium, but not Grafana: the figure shows the results of its
queries, not its appearance.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "deploy" / "grafana-dashboard.json"
RESULT = ROOT / "docs" / "measurements" / "dashboard_cpu.json"
PICTURE = ROOT / "docs" / "figures" / "bench_report.png"
PROMETHEUS_PORT = 9099
STEP_S = 2
WINDOW = "20s"
"""Interval of rates, in place of Grafana's $__rate_interval."""
SECONDS = 90
LOAD = (
    *("--traffic", "study", "--length-scale", "0.1", "--max-token-id", "2048"),
    *("--shared-prefix-tokens", "48", "--rate-steps", "0.5,1,2", "--duration", str(SECONDS)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default="prometheus", help="the program")
    parser.add_argument("--chromium", default="chromium", help="the program")
    programs = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving() as url, scraping(url, folder, programs.prometheus):
            began = time.time()
            load(url, folder / "report.html")
            panels = evaluate(began, time.time())
        write(panels)
        photograph(folder / "report.html", programs.chromium)


@contextmanager
def serving() -> Iterator[str]:
    """Context manager: serves the embedded model. Yields its base URL."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxserve", "--port", "0"]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if ready := re.search(r"is ready: \S+ at (http\S+)/v1", line):
                yield ready[1]
                break
        else:
            raise SystemExit("the server ended before it was ready")
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate()


@contextmanager
def scraping(url: str, folder: Path, program: str) -> Iterator[None]:
    """Context manager: runs a Prometheus that reads the server's metrics each second."""
    settings = folder / "prometheus.yml"
    target = urllib.parse.urlparse(url).netloc
    settings.write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n  - job_name: jaxserve\n"
        f'    static_configs: [{{targets: ["{target}"]}}]\n'
    )
    command = [program, f"--config.file={settings}", f"--storage.tsdb.path={folder / 'data'}"]
    command.append(f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}")
    prometheus = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        time.sleep(5)
        yield
    finally:
        prometheus.terminate()
        prometheus.wait()


def load(url: str, report: Path) -> None:
    command = [sys.executable, "-m", "jaxserve", "bench", "--url", url, *LOAD]
    subprocess.run([*command, "--html", str(report)], check=True, stdout=subprocess.DEVNULL)


def evaluate(began: float, ended: float) -> list[dict[str, Any]]:
    """Each panel with its lines: a label, and seconds and values."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [
        {
            "title": panel["title"],
            "unit": panel["fieldConfig"]["defaults"]["unit"],
            "place": panel["gridPos"],
            "lines": [
                line
                for target in panel["targets"]
                for line in lines(target["expr"], target["legendFormat"], began, ended)
            ],
        }
        for panel in panels
    ]


def lines(query: str, legend: str, began: float, ended: float) -> list[dict[str, Any]]:
    query = query.replace("$instance", ".*").replace("$__rate_interval", WINDOW)
    found = ask("query_range", query=query, start=began, end=ended, step=STEP_S)
    return [
        {
            "label": labelled(legend, series["metric"]),
            "points": [
                [round(at - began, 1), float(f"{float(value):.4g}")]
                for at, value in series["values"]
                if value != "NaN"
            ],
        }
        for series in found
    ]


def labelled(legend: str, labels: dict[str, str]) -> str:
    """Fills the labels of a series into a legend such as `{{kind}}`."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)


def ask(route: str, **parameters: object) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{PROMETHEUS_PORT}/api/v1/{route}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url) as reply:
        return json.load(reply)["data"]["result"]


def write(panels: list[dict[str, Any]]) -> None:
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True, cwd=ROOT)
    result = {
        "what": "the queries of deploy/grafana-dashboard.json over a run of jaxserve bench",
        "device": f"CPU, {os.cpu_count()} cores shared with other work, {platform.machine()}",
        "model": "jaxserve-embedded",
        "versions": {"jax": version("jax"), "python": platform.python_version()},
        "commit": commit.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python scripts/record_dashboard.py",
        "load": " ".join(("jaxserve bench", *LOAD)),
        "rate_window": WINDOW,
        "panels": panels,
    }
    RESULT.write_text(json.dumps(result) + "\n", encoding="utf-8")


def photograph(page: Path, program: str) -> None:
    browser = shutil.which(program)
    if browser is None:
        raise SystemExit(f"no {program}: the report was not photographed")
    size = ("--window-size=1000,1700", "--force-device-scale-factor=1", "--hide-scrollbars")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", *size]
    command += [f"--screenshot={PICTURE}", page.as_uri()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
