"""One command measures all that is claimed of a GPU: its parts exist, its accounts are kept."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from scripts import prove_on_card
from scripts.proofs import NEEDS, PROOFS, Proof

ROOT = Path(__file__).parents[1]
FLAG = re.compile(r"--[a-z][a-z0-9-]+")
PLACES = {"out": "o", "cache": "c", "url": "u", "port": 1, "python": "python"}
COMMANDS = sorted(
    {command.format(**PLACES) for proof in PROOFS.values() for command in proof.commands}
    | {f"-m jaxserve {proof.server}".format(**PLACES) for proof in PROOFS.values() if proof.server}
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_uses_flags_that_there_are(command: str) -> None:
    words = shlex.split(command)
    server = flags_in(ROOT / "jaxserve" / "cli" / "options.py")
    server |= flags_in(ROOT / "jaxserve" / "cli" / "flags.py")
    server |= flags_in(ROOT / "jaxserve" / "cli" / "engine_flags.py")
    if words[:2] == ["-m", "pytest"]:
        assert (ROOT / words[4]).exists()
    elif words[:3] == ["-m", "jaxserve", "bench"]:
        ours, _, servers = command.partition(" --server ")
        assert set(FLAG.findall(ours)) <= bench_flags()
        assert set(FLAG.findall(servers)) <= server
    elif words[0] == "-m" and words[1].startswith("lab."):
        assert set(FLAG.findall(command)) <= flags_in(ROOT / f"{words[1].replace('.', '/')}.py")
    elif words[0] == "-m":
        assert set(FLAG.findall(command)) <= server
    else:
        ours, _, servers = command.partition(" -- ")
        assert set(FLAG.findall(ours)) <= flags_in(ROOT / words[0])
        assert set(FLAG.findall(servers)) <= server


def flags_in(source: Path) -> set[str]:
    return set(re.findall(r'"(--[a-z][a-z0-9-]+)"', source.read_text()))


def bench_flags() -> set[str]:
    fields = (ROOT / "jaxserve" / "bench" / "options.py").read_text().replace("_", "-")
    return {f"--{name}" for name in re.findall(r"^    ([a-z-]+):", fields, re.MULTILINE)} | {
        "--output"
    }


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Proof]:
    made = {
        "good": Proof("works", 1, ("-c \"open(r'{out}/seen', 'a').write('x')\"",)),
        "bad": Proof("fails", 1, ('-c "raise SystemExit(3)"', "-c \"print('benchmarked')\"")),
        "hangs": Proof("hangs", 0.001, ('-c "import time; time.sleep(60)"',)),
    }
    monkeypatch.setattr(prove_on_card, "PROOFS", made)
    monkeypatch.setattr(prove_on_card, "_describe", lambda *_: None)
    return made


def prove(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["prove_on_card.py", *words, "--out", str(out)])
    return prove_on_card.main()


def test_what_failed_is_told_and_run_again_and_what_passed_is_not(
    proofs: dict[str, Proof],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert prove(monkeypatch, tmp_path, "--gpus", "0,1") == 2
    assert "1 of 3 passed; not: " in capsys.readouterr().out
    log = (tmp_path / "bad" / "log").read_text().splitlines()
    assert "exit status 3 after 0 s" in log
    assert "benchmarked" in log, "what comes after a failing test"
    assert "timed out" in (tmp_path / "hangs" / "log").read_text()
    proofs["bad"] = proofs["good"]
    assert prove(monkeypatch, tmp_path, "good", "bad") == 0
    assert [(tmp_path / name / "seen").read_text() for name in ("good", "bad")] == ["x", "x"]
    assert prove(monkeypatch, tmp_path, "good", "--again") == 0
    assert (tmp_path / "good" / "seen").read_text() == "xx"


def test_what_lacks_packages_fails_alone_and_names_them(
    proofs: dict[str, Proof],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    needs = {"3)": ("pytest", "no-such-a", "no-such-b")}
    monkeypatch.setattr(prove_on_card, "NEEDS", needs)
    assert prove(monkeypatch, tmp_path, "bad", "good") == 1
    told = capsys.readouterr().out.splitlines()
    assert "bad: FAILS without no-such-a, no-such-b: pip install them" in told
    assert told[-1] == "1 of 2 passed; not: bad"
    log = (tmp_path / "bad" / "log").read_text().splitlines()
    assert "not run; not installed: no-such-a, no-such-b" in log
    assert "benchmarked" in log, "which needs none of them"


def test_every_need_is_one_of_some_command() -> None:
    for words in NEEDS:
        assert any(words in command for command in COMMANDS), words


def test_nothing_begins_after_the_budget(
    proofs: dict[str, Proof], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert prove(monkeypatch, tmp_path, "--budget", "0") == len(proofs)
    assert not (tmp_path / "good").exists()


def test_a_dry_run_prints_the_commands_and_runs_none(
    proofs: dict[str, Proof],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert prove(monkeypatch, tmp_path, "bad", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [shlex.split(line)[2] for line in lines] == [
        "raise SystemExit(3)",
        "print('benchmarked')",
    ]
    assert not list(tmp_path.iterdir())
