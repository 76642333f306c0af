"""From what a user says a model is (a folder, a file, a hub id) to its configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """A configuration and where it was found.

    `weight_bytes`: what the weights' files in its folder take; None where there are none.
    """

    values: dict[str, Any]
    source: str
    weight_bytes: int | None = None


def read_config(model: str | Path) -> ModelConfig:
    """Read the configuration of a model: a folder with a config.json, such a file, or a hub id.

    A hub id is looked up with huggingface_hub, in its cache first if there is no connection.

    Raises
    ------
    ConfigError
        There is no such file, it cannot be had, or it is not a JSON object.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _read(path / "config.json", path)
    if path.is_file():
        return _read(path, path.parent)
    looks_local = path.is_absolute() or str(model).startswith((".", "~")) or path.suffix == ".json"
    if looks_local or str(model).count("/") > 1:
        raise ConfigError(f"{model}: there is no such file or folder")
    return _read(_download(str(model)), None, source=f"{model} (hub)")


def _read(file: Path, folder: Path | None, source: str | None = None) -> ModelConfig:
    source = source or str(file)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: is not UTF-8: {error.reason} at byte {error.start}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: must be a JSON object, not {type(values).__name__}")
    return ModelConfig(values, source, _weight_bytes(folder) if folder else None)


def _weight_bytes(folder: Path) -> int | None:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


def _download(model: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise ConfigError(
            f"{model}: is neither a file nor a folder, and a hub id needs huggingface_hub: "
            "pip install huggingface_hub"
        ) from error
    try:
        return Path(hf_hub_download(model, "config.json"))
    except (OSError, HfHubHTTPError, HFValidationError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"{model}: is neither a file nor a folder, and the hub does not give its config.json: {reason}"
        ) from error
