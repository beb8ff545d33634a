"""Starts the server several times, and prints the time to readiness and the memory.

    python scripts/bench_start.py --runs 3 -- --model FOLDER --require-precompiled

Flags after `--` are the server's. The server is ready when `/ready` first answers 200; it is polled
every 20 ms from the creation of the process. Memory is read from /proc a second later. `cpu` is the
processor time until then, which distinguishes a slow start from a busy machine. `weights` is the
time of loading the weights, which overlaps other phases.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

_STATUS = {
    "resident": "VmRSS",
    "anonymous": "RssAnon",
    "of files": "RssFile",
    "peak": "VmHWM",
    "threads": "Threads",
}
"""Our names of figures -> names in /proc/PID/status. Pages of files are shared with the page
cache."""

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (\d+)\s*(.*)$")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for ready")
    parser.add_argument("--memory", action="store_true", help="print the memory by mapping")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument(
        "--compare", type=Path, help="a file of --json: print the difference from it"
    )
    parser.add_argument("--max-ready", type=float, help="fail if the best run took longer")
    parser.add_argument("flags", nargs="*", help="flags of the server")
    options = parser.parse_args()
    runs = [run(options.flags, options.timeout, memory=options.memory) for _ in range(options.runs)]
    best = min(each["ready"] for each in runs)
    print(f"best of {len(runs)}: ready after {best:.2f} s")
    if options.compare:
        print(difference(json.loads(options.compare.read_text())["runs"], runs))
    if options.json:
        options.json.write_text(json.dumps({"flags": options.flags, "runs": runs}, indent=1))
    return int(options.max_ready is not None and best > options.max_ready)


def difference(before: list[dict[str, float]], after: list[dict[str, float]]) -> str:
    """Returns in words how the best of the later runs differ from the best of the earlier ones."""
    told: list[str] = []
    for name, unit in (("ready", "s"), ("weights", "s"), ("cpu", "s"), ("peak", "MB")):
        was, now = (min(each[name] for each in runs) for runs in (before, after))
        told.append(f"{name} {now:.2f} instead of {was:.2f} {unit} ({now - was:+.2f})")
    return "; ".join(told)


def run(flags: list[str], timeout: float, *, memory: bool) -> dict[str, float]:
    """One start: seconds until the port answers and until it is ready, memory in MB."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    load, started = os.getloadavg()[0], time.monotonic()
    arguments = [sys.executable, "-m", "jaxserve", "--port", str(port), "--profile-startup", *flags]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        found = {"load": load, **wait(process, f"http://127.0.0.1:{port}", started, timeout)}
        found["cpu"] = cpu_seconds(process.pid)
        time.sleep(1.0)
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        for name, field in _STATUS.items():
            value = int(re.findall(rf"^{field}:\s+(\d+)", status, re.M)[0])
            found[name] = value if name == "threads" else value / 1024
        table = [line for line in lines if re.match(r"phase |.* \d+\.\d\ds +\d+\.\d\ds ", line)]
        print("".join(table), end="")
        loading = re.search(r"^weights +[0-9.]+s +([0-9.]+)s", "".join(table), re.M)
        found["weights"] = float(loading[1]) if loading else 0.0
        print(", ".join(f"{name} {value:.2f}" for name, value in found.items()), flush=True)
        if memory:
            show_memory(process.pid)
    except BaseException:
        print("".join(lines[-20:]))
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process so far. It does not depend on other load."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait(
    process: subprocess.Popen[str], url: str, started: float, timeout: float
) -> dict[str, float]:
    found: dict[str, float] = {}
    while process.poll() is None and time.monotonic() < started + timeout:
        for name, route in (("port", "/live"), ("ready", "/ready")):
            if name not in found and answers(url + route):
                found[name] = time.monotonic() - started
        if "ready" in found:
            return found
        time.sleep(0.02)
    raise SystemExit(f"not ready after {time.monotonic() - started:.0f} s")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


def show_memory(pid: int) -> None:
    """Prints resident memory by mapping, the largest first."""
    resident: Counter[str] = Counter()
    mapped = ""
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        if header := _MAPPING.match(line):
            mapped = Path(header[2]).name if header[2] else "anonymous"
        elif line.startswith("Rss:"):
            resident[mapped] += int(line.split()[1])
    for name, kilobytes in resident.most_common(12):
        print(f"  {kilobytes / 1024:8.1f} MB  {name}")


if __name__ == "__main__":
    sys.exit(main())
