"""The documentation names what exists: files, flags and their defaults, metrics, messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median

import pytest

from jaxserve.bench.command import main as bench
from jaxserve.cli.foreign_flags import CHECKED, NOT_HERE, ONE, SAME, SIZES, SWITCHES, VALUED
from jaxserve.cli.options import parse_args
from jaxserve.metrics.metrics import Metrics
from jaxserve.offload.counters import OffloadCounters
from jaxserve.ray.settings import parse as parse_fleet
from jaxserve.startup.buckets import CPU_DECODE, CPU_PREFILL, GPU_DECODE, GPU_PREFILL
from jaxserve.startup.engine_plan import _CPU_MAX_ITL_MS, _GPU_MAX_ITL_MS
from lab.words import MOST, pages, sentences

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SCRIPTS = ROOT / "scripts" / "README.md"
PAGES = sorted(
    [
        *(*ROOT.glob("*.md"), *DOCS.glob("**/*.md"), *ROOT.glob(".github/**/*.md"), SCRIPTS),
        *ROOT.glob("checkpoints/*/embedded/*.md"),
    ]
)
MONITORING = DOCS / "monitoring.md"
TROUBLESHOOTING = DOCS / "troubleshooting.md"

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|md|sh|jsonl?|textproto)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+(?![\w])")
SCRIPT = re.compile(r"(?:scripts|lab/\w+)/\w+\.py|-m lab\.\w+\.\w+")
METRIC = re.compile(r"`((?:vllm:|jaxserve_|process_)\w+)(?:\{[^`]*\})?`")
PACKAGES = {"jaxserve_kernels", "jaxserve_checkpoints"}
NOT_OURS = {"Unable to initialize backend 'tpu'"}
"""Messages of the table for troubleshooting that come from a library."""
WRITTEN = {"docs/measurements/kv_sweep.json"}
"""Files that a command of an example writes."""
NOT_OUR_FLAGS = {
    *("--build-arg", "--kv-cache-block-size", "--migration-limit"),
    "--no-router-kv-events",
}

LINKED = [*PAGES, *sorted(ROOT.glob("lab/**/*.md"))]
"""The logs name files and flags of their own commits; links must hold all the same."""

parametrize_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def flags_of_the_parser(capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    return set(re.findall(r"^ +(?:-h, )?(--[a-z0-9-]+)", capsys.readouterr().out, re.M))


def flags_of_the_benchmark(capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        bench(["--help"])
    return set(re.findall(r"^ +(?:-h, )?(--[a-z0-9-]+)", capsys.readouterr().out, re.M))


def flags_of_convert(capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        parse_args(["--help"], "convert")
    return set(re.findall(r"^ +(?:-h, )?(--[a-z0-9-]+)", capsys.readouterr().out, re.M))


def flags_of_fleets(capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        parse_fleet(["--help"])
    return set(re.findall(r"^ +(?:-h, )?(--[a-z0-9-]+)", capsys.readouterr().out, re.M))


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    """Of half of them; `python -m lab.words` prints it for each page."""
    assert median(sentences(page.read_text(encoding="utf-8"))) < MOST


@parametrize_pages
def test_tables_have_a_head(page: Path) -> None:
    """Else they are shown as a line of bars."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert re.match(r"\|.*\n\|[ :|-]+\|\n", table), table.splitlines()[0]


@parametrize_pages
def test_files_that_are_named_exist(page: Path) -> None:
    """In code spans, from the root or from the package of kernels; a model's own are not ours."""
    for code in CODE.findall(page.read_text()):
        for name in FILE.findall(code):
            places = (ROOT, ROOT / "kernels" / "jaxserve_kernels")
            assert any((place / name).exists() for place in places), name


def source(script: str) -> str:
    """Of a path, or of `-m package.module`."""
    if script.startswith("-m "):
        script = script.removeprefix("-m ").replace(".", "/") + ".py"
    return (ROOT / script).read_text()


@parametrize_pages
def test_flags_that_are_named_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the script that a line names, otherwise of the program. Blocks of commands are run or
    parsed by tests/test_docs_examples.py."""
    if page.parent.name == "embedded":
        return  # it quotes commands of other programs, too
    known = (
        flags_of_the_parser(capsys)
        | flags_of_convert(capsys)
        | {"--config", "--gpu", "--gpu-memory", "--json", "--device", "--all"}
    )
    if page.name == "benchmarking.md":
        known |= flags_of_the_benchmark(capsys)
    if page.name in ("ray-serve.md", "CHANGELOG.md"):
        known |= flags_of_fleets(capsys)
    if page.name in ("from-vllm.md", "CHANGELOG.md"):
        known |= SAME.keys() | ONE | SWITCHES | VALUED | NOT_HERE.keys() | CHECKED | SIZES.keys()
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
    for line in text.splitlines():
        scripts = "".join(source(name) for name in SCRIPT.findall(line))
        for flag in FLAG.findall(line):
            if flag.startswith("--xla") or flag in NOT_OUR_FLAGS:
                continue
            flag = flag.replace("--no-", "--")
            assert f'"{flag}"' in scripts if scripts else flag in known, line


def test_every_flag_is_in_the_table_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """tests/test_docs_tables.py holds the table to what the parser says."""
    shown = re.findall(r"^\| `(--[a-z0-9-]+)` \|", (DOCS / "flags.md").read_text(), re.M)
    flags = flags_of_the_parser(capsys) - {"--help", "--version"}
    assert flags == set(shown) & flags
    assert set(shown) - flags == {
        "--all",
        "--device",
        "--gpu",
        "--gpu-memory",
        "--json",
        "--keep",
        "--out",
        "--quantization-method",
        "--to",
    }


def test_every_flag_has_a_default_that_people_can_read() -> None:
    text = (DOCS / "flags.md").read_text()
    rows = re.findall(r"^\| `(--[a-z0-9-]+)` \| (.*?) \|", text, re.M)
    assert len(rows) > 60 and all(default for _, default in rows)
    for name, value in asdict(parse_args([])).items():
        if value is not None and not isinstance(value, bool):
            shown = f"{value:g}" if type(value) is float else str(value)
            assert (f"--{name.replace('_', '-')}", shown) in rows
    defaults = dict(rows)
    for flag, values in (
        ("--decode-buckets", (GPU_DECODE, CPU_DECODE)),
        ("--prefill-buckets", (GPU_PREFILL, CPU_PREFILL)),
        ("--max-itl-ms", ((int(_GPU_MAX_ITL_MS),), (int(_CPU_MAX_ITL_MS),))),
    ):
        gpu, cpu = (",".join(map(str, each)) for each in values)
        assert defaults[flag] == f"{gpu} on a GPU, {cpu} on a CPU"


def exposition() -> str:
    """What a server that is ready exports."""
    metrics = Metrics("m")
    metrics.set_cache_info(page_size=64, num_pages=2)
    metrics.open_tier(OffloadCounters(), num_bytes=1, slot_bytes=1)
    return metrics.exposition().decode()


def test_every_script_is_listed() -> None:
    listed = re.findall(r"`(\w+\.(?:py|sh))`", SCRIPTS.read_text())
    files = [file.name for end in ("py", "sh") for file in SCRIPTS.parent.glob(f"*.{end}")]
    assert sorted(listed) == sorted(files)


def test_the_metrics_of_the_table_are_those_of_the_exposition() -> None:
    families = re.findall(r"^# TYPE (\S+) ", exposition(), re.M)
    exported = {name for name in families if not name.endswith("_created")}
    assert set(METRIC.findall(MONITORING.read_text())) - PACKAGES == exported


def test_the_metrics_of_the_table_have_the_types_of_the_exposition() -> None:
    exported = dict(re.findall(r"^# TYPE (\S+) (\S+)", exposition(), re.M))
    rows = re.findall(
        r"^\| (`\S*[:_].*?) \| (gauge|counter|histogram) \|", MONITORING.read_text(), re.M
    )
    documented = {name: kind for names, kind in rows for name in re.findall(r"`(\S+)`", names)}
    assert documented.items() <= exported.items() and len(documented) > 40


@parametrize_pages
def test_metrics_that_are_named_exist(page: Path) -> None:
    exported = exposition()
    for name in set(METRIC.findall(page.read_text())) - PACKAGES:
        assert f"# TYPE {name} " in exported, name


def test_pages_and_measurements_that_sources_name_exist() -> None:
    """In comments and docstrings: where a number comes from."""
    for package in ("jaxserve", "checkpoints", "kernels", "scripts"):
        for file in (ROOT / package).glob("**/*.py"):
            for name in re.findall(r"\b(?:docs|lab)/[\w/]+\.(?:md|json)", file.read_text()):
                assert (ROOT / name).exists() or name in WRITTEN, f"{file.name}: {name}"


def texts_of_sources() -> Iterator[str]:
    """Every string of the packages, with … for what f-strings put in."""
    for package in ("jaxserve", "checkpoints", "kernels"):
        for file in (ROOT / package).glob("**/*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (
                        part if isinstance(part, ast.Constant) else None for part in node.values
                    )
                    yield "".join("…" if part is None else str(part.value) for part in parts)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_messages_of_the_table_for_troubleshooting_are_those_of_the_sources() -> None:
    """Piece by piece: what stands between two … or colons is in one string."""
    table = TROUBLESHOOTING.read_text().partition("\n## Messages\n")[2]
    messages = set(re.findall(r"^\| `(.+?)` \| ", table, re.M)) - NOT_OURS
    assert len(messages) > 12
    said = "\n".join(texts_of_sources()).replace("`", "")
    pieces = {piece.strip(" :,()") for message in messages for piece in re.split("…|: ", message)}
    assert [piece for piece in pieces if piece not in said] == []
