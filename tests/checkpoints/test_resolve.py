"""Model names: folders, short names and Hub ids, with the Hub replaced by its cache on disk."""

import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import errors

from jaxserve.models.registry import HUB_NAMES
from jaxserve_checkpoints import resolve
from jaxserve_checkpoints.reader import CheckpointError
from jaxserve_checkpoints.resolve import embedded_model, resolve_model

COMMIT = "0" * 40
FILES = ("config.json", "model.safetensors", "tokenizer.json")
"""Of a complete copy."""


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub client's own offline switch: every request fails before it leaves the process."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def cached_model(cache: Path, hub_id: str, *files: str, revision: str = "main") -> Path:
    """A model in the layout of the Hub cache."""
    folder = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / revision).write_text(COMMIT)
    for name in files:
        (snapshot / name).write_text("{}")
    return snapshot


def count_downloads(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[str]:
    """The models that are asked for on the network, which adds nothing to the cache."""
    asked: list[str] = []

    def download(repo_id: str, *, local_files_only: bool, **_: object) -> str:
        asked.extend([] if local_files_only else [repo_id])
        return str(cache / f"models--{repo_id.replace('/', '--')}" / "snapshots" / COMMIT)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


def error_of(model: str, **kwargs: object) -> str:
    with pytest.raises(CheckpointError) as error:
        resolve_model(model, **kwargs)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_local_paths_that_are_no_model_folders(tmp_path: Path) -> None:
    assert "holds no config.json" in error_of(str(tmp_path))
    (tmp_path / "x.gguf").write_text("")
    assert "x.gguf: a file; pass the folder" in error_of(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    "model", ["./x", "/no/such", "../x", "~/no/such", "~nobody9/x", "a/b/c", "org/name/"]
)
def test_paths_that_do_not_exist_never_reach_the_hub(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert error_of(model) == f"{model}: no such folder"


@pytest.mark.parametrize("model", ["gpt-2", "", "a b/c", "qwen3-5b"])
def test_unknown_names_list_the_known_ones(model: str) -> None:
    message = error_of(model, names=HUB_NAMES)
    assert f"unknown model {model!r}" in message
    assert "qwen3-0.6b" in message and "jaxserve-embedded" in message


def test_a_name_with_a_typing_error_gets_the_nearest() -> None:
    assert "Did you mean qwen3-8b?" in error_of("qwen3-8bb", names=HUB_NAMES)
    assert "Did you mean" not in error_of("falcon", names=HUB_NAMES)


def test_the_embedded_model_has_a_name() -> None:
    assert resolve_model("jaxserve-embedded") == embedded_model()


def test_short_names_are_those_of_the_configuration() -> None:
    assert HUB_NAMES["qwen3-0.6b"] == "Qwen/Qwen3-0.6B"
    assert HUB_NAMES["qwen3-32b"] == "Qwen/Qwen3-32B"


@pytest.mark.parametrize("model", ["qwen3-4b", "Qwen3-4B", "Qwen/Qwen3-4B"])
def test_complete_copies_in_the_cache_are_used_without_the_network(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cached_model(tmp_path, "Qwen/Qwen3-4B", *FILES)
    asked = count_downloads(monkeypatch, tmp_path)
    assert resolve_model(model, names=HUB_NAMES, download_dir=tmp_path) == snapshot
    assert not asked


def test_a_copy_without_a_tokenizer_is_completed_unless_there_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cached_model(tmp_path, "org/name", "config.json", "model.safetensors")
    asked = count_downloads(monkeypatch, tmp_path)
    assert resolve_model("org/name", download_dir=tmp_path, tokenizer=False) == snapshot
    assert not asked
    assert resolve_model("org/name", download_dir=tmp_path) == snapshot
    assert asked == ["org/name"]


def test_revisions_are_told_apart(tmp_path: Path) -> None:
    snapshot = cached_model(tmp_path, "org/name", *FILES, revision="v2")
    assert resolve_model("org/name", download_dir=tmp_path, revision="v2") == snapshot
    assert "not reachable" in error_of("org/name", download_dir=tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {"a": "s1.safetensors"}}', "no json"])
def test_interrupted_downloads_are_not_taken_for_models(index: str, tmp_path: Path) -> None:
    snapshot = cached_model(tmp_path, "org/name", "config.json")
    assert "has no config.json with model.safetensors" in error_of(
        "org/name", download_dir=tmp_path
    )
    (snapshot / "model.safetensors.index.json").write_text(index)
    assert "has no config.json with model.safetensors" in error_of(
        "org/name", download_dir=tmp_path
    )


def test_a_cached_model_with_all_shards_is_complete(tmp_path: Path) -> None:
    snapshot = cached_model(tmp_path, "org/name", "config.json", "s1.safetensors", "tokenizer.json")
    index = snapshot / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "s1.safetensors"}}')
    assert resolve_model("org/name", download_dir=tmp_path) == snapshot


def test_an_unreachable_hub_is_one_line(tmp_path: Path) -> None:
    message = error_of("qwen3-8b", names=HUB_NAMES, download_dir=tmp_path)
    assert f"Qwen/Qwen3-8B into {tmp_path / 'models--Qwen--Qwen3-8B'}: not reachable" in message
    assert "--model FOLDER" in message
    assert "--load-format dummy" in message


def test_downloads_ask_for_weights_configuration_and_tokenizer_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, object]] = []

    def download(repo_id: str, **kwargs: object) -> str:
        calls.append({"repo_id": repo_id, **kwargs})
        if kwargs["local_files_only"]:
            raise FileNotFoundError("not cached")
        return str(cached_model(tmp_path, repo_id, "config.json", "model.safetensors"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = resolve_model("org/name", download_dir=tmp_path, revision="v1")
    assert found.name == COMMIT
    assert [call["local_files_only"] for call in calls] == [True, False]
    for call in calls:
        assert call["repo_id"] == "org/name"
        assert call["revision"] == "v1"
        assert call["cache_dir"] == tmp_path
        assert "*.bin" not in call["allow_patterns"]
        assert {"*.safetensors", "*.json", "*.jinja"} <= set(call["allow_patterns"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GatedRepoError", "access to it must be granted"),
        ("RepositoryNotFoundError", "no such model, or a private one"),
        ("RevisionNotFoundError", "it has no revision 'v9'"),
    ],
)
def test_refusals_of_the_hub_say_what_to_do(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = getattr(errors, name)

    def download(*_: object, local_files_only: bool, **__: object) -> str:
        raise FileNotFoundError if local_files_only else kind.__new__(kind)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    text = error_of("org/name", download_dir=tmp_path, revision="v9")
    assert f"cannot download org/name into {tmp_path / 'models--org--name'}: {message}" in text


def test_a_folder_that_was_mistyped_is_not_only_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    message = "there is no folder models/mistyped, and cannot download models/mistyped into"
    assert message in error_of("models/mistyped", download_dir=tmp_path)
    assert "there is no folder" not in error_of("org/name", download_dir=tmp_path)


def test_other_failures_of_a_download_keep_their_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, local_files_only: bool, **__: object) -> str:
        if local_files_only:
            raise FileNotFoundError
        raise RuntimeError("while writing\nmore") from OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    text = error_of("org/name", download_dir=tmp_path)
    assert "download failed (OSError: [Errno 28] No space left on device)" in text


def test_a_download_without_safetensors_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cached_model(tmp_path, "org/name", "config.json")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    message = error_of("org/name", download_dir=tmp_path)
    assert "org/name has no config.json with model.safetensors or the shards" in message
    assert str(snapshot) in message


def test_embedded_model_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.resources.files", lambda _: tmp_path)
    (tmp_path / "embedded").mkdir()
    (tmp_path / "embedded" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors, tokenizer\.json"):
        embedded_model()
    for name in resolve.EMBEDDED_FILES:
        (tmp_path / "embedded" / name).write_text("{}")
    assert embedded_model() == tmp_path / "embedded"


def test_the_hub_client_and_jax_are_not_imported_for_local_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys; from jaxserve_checkpoints.resolve import resolve_model; "
        f"resolve_model({str(tmp_path)!r}); "
        "print(sorted({'jax', 'huggingface_hub', 'torch', 'jaxserve'} & sys.modules.keys()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"
