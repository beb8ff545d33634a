"""Records a server's start and a chat as a picture, docs/figures/terminal.svg.

    python scripts/record_terminal.py

A real server serves the embedded model on this machine's CPU. The picture shows its log and a real
answer. Run the script twice: the first start compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from rich.console import Console
from rich.text import Text

FILE = Path(__file__).parents[1] / "docs" / "figures" / "terminal.svg"
QUESTION = "What is the capital of France?"
WIDTH = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FILE, help="the picture")
    out = parser.parse_args().out
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text("$ python -m jaxserve --port 0", style="bold green"))
    command = [sys.executable, "-m", "jaxserve", "--port", "0"]
    server = subprocess.Popen(
        command,
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    try:
        url = _show_start(server, console)
        _show_chat(url, console)
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate()
    console.save_svg(str(out), title="jaxserve on a CPU, compiled before", unique_id="terminal")


def _show_start(server: subprocess.Popen[str], console: Console) -> str:
    """Prints the server's lines up to the one with a command, after it is ready. Returns the
    URL."""
    assert server.stdout is not None
    url = ""
    for line in server.stdout:
        console.print(Text(line.rstrip().replace(str(Path.home()), "~")), soft_wrap=False)
        if "is ready" in line:
            url = next(word for word in line.split() if word.startswith("http"))
        elif url:
            return url
    raise SystemExit("the server ended before it was ready")


def _show_chat(url: str, console: Console) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True}
    console.print(Text(f'\n$ # POST {url}/chat/completions, "{QUESTION}"', style="bold green"))
    request = urllib.request.Request(
        f"{url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    answer, began = "", time.monotonic()
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    answer += choice["delta"].get("content") or ""
    console.print(Text(answer.strip()))
    console.print(Text(f"({time.monotonic() - began:.2f} s)", style="dim"))


if __name__ == "__main__":
    main()
