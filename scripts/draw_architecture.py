"""Draws docs/figures/architecture.svg: threads, packages, and the data of one step.

python scripts/draw_architecture.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parents[1] / "docs" / "figures" / "architecture.svg"
WIDTH, HEIGHT = 960, 560
LANES = (
    (20, 290, "event loop", "HTTP; never imports jax"),
    (330, 300, "engine thread", "owns the device"),
    (650, 290, "device", "one CUDA graph per step"),
)


class Box(NamedTuple):
    """A part of the program: its position, name and purpose."""

    x: int
    y: int
    width: int
    name: str
    text: str
    height: int = 54


BOXES = (
    Box(40, 90, 250, "server/request", "parse, chat template, tokens"),
    Box(40, 170, 250, "grammar processes", "beside the server: allowed tokens"),
    Box(40, 340, 250, "server: the APIs' folders", "answers and their events"),
    Box(40, 440, 250, "server/output", "tokens to text, stop strings"),
    Box(350, 90, 260, "engine", "inbox, loop, mailboxes"),
    Box(350, 170, 260, "scheduler: plan", "step t+1: rows, chunks, pages"),
    Box(350, 250, 260, "runner: pack and launch", "the plan as one int32 array"),
    Box(350, 360, 260, "runner: collect", "wait for the results of step t"),
    Box(350, 440, 260, "scheduler: commit", "append tokens, end sequences"),
    Box(670, 90, 250, "state, donated", "KV cache, slots, tables"),
    Box(670, 220, 250, "models and kernels", "forward pass", 54),
    Box(670, 290, 250, "sampler", "penalties, masks, the draw"),
    Box(670, 360, 250, "results", "token, logprob, alternatives"),
)

ARROWS = (
    ((290, 117), (350, 117), "Request"),
    ((290, 197), (350, 197), "mask"),
    ((480, 144), (480, 170), ""),
    ((480, 224), (480, 250), "StepPlan"),
    ((610, 260), (670, 260), "array"),
    ((795, 144), (795, 220), "read and written"),
    ((795, 274), (795, 290), ""),
    ((795, 344), (795, 360), ""),
    ((670, 387), (610, 387), "int32"),
    ((480, 414), (480, 440), ""),
    ((350, 467), (290, 467), "tokens"),
    ((165, 440), (165, 394), "text"),
)


def svg() -> str:
    """The drawing as SVG text. It is deterministic."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="sans-serif" font-size="13">',
        "<title>Threads, packages and one step's data</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="#555"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for x, width, name, text in LANES:
        parts.append(
            f'<rect x="{x}" y="20" width="{width}" height="{HEIGHT - 40}" rx="8" fill="#f4f6f8" '
            'stroke="#c3ccd5"/>'
        )
        parts.append(_text(x + 15, 46, name, bold=True) + _text(x + 15, 66, text, colour="#555"))
    for box in BOXES:
        parts.append(
            f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="5" '
            'fill="#fff" stroke="#4a78a8"/>'
        )
        parts.append(_text(box.x + 10, box.y + 22, box.name, bold=True))
        parts.append(_text(box.x + 10, box.y + 42, box.text, colour="#555"))
    for (x, y), (to_x, to_y), label in ARROWS:
        parts.append(
            f'<path d="M{x} {y} {to_x} {to_y}" stroke="#555" stroke-width="1.5" fill="none" '
            'marker-end="url(#tip)"/>'
        )
        if label:
            side = 8 if x == to_x else -len(label) * 3
            parts.append(_text((x + to_x) // 2 + side, (y + to_y) // 2 - 4, label, size=11))
    note = "The host plans and launches step t+1 while the device still runs step t."
    parts.append(_text(40, HEIGHT - 34, note, colour="#555"))
    return "\n".join([*parts, "</svg>", ""])


def _text(
    x: int, y: int, text: str, *, bold: bool = False, colour: str = "#111", size: int = 13
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}"{weight}>{escape(text)}</text>'


def main() -> None:
    FILE.write_text(svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
