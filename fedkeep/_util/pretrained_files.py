"""Files of pre-trained models, in a folder or on the Hugging Face hub, read by `transformers`.

Code that comes with a model is never run, and weights are read from safetensors files only: other files may be pickles.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedkeep._util.optional import require_extra
from fedkeep._util.text import one_line
from fedkeep.errors import FedkeepError

_TOKENIZERS = ("tokenizer.json", "vocab.*", "*.model")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")


def load_files(kind: str, name: str, key: str, error: type[FedkeepError], **options: Any) -> Any:
    """Return `transformers.<kind>.from_pretrained(name)`: of a folder without any download, else from the hub.

    Whatever fails becomes an error with this key, in one line.
    """
    transformers = require_extra("transformers", "text", f"{key} = {name!r}", error)
    folder = Path(name).expanduser()
    is_folder = folder.is_dir()
    if not is_folder and (folder.is_absolute() or name.startswith((".", "~")) or "\0" in name):
        raise error(f"{key} = {name!r}: there is no such folder", key=key, value=name)
    if options.get("use_safetensors") and is_folder:
        _require_safetensors(folder, key, error)
    try:
        with _quiet(transformers):
            return getattr(transformers, kind).from_pretrained(
                str(folder) if is_folder else name, local_files_only=is_folder, trust_remote_code=False, **options
            )
    except Exception as reason:  # of the hub, the network or a file: each has its own type
        where = f"the files in {folder}" if is_folder else f"{name!r} is no folder here, and the model on the hub"
        raise error(f"{where} cannot be loaded: {one_line(reason)}", key=key, value=name) from reason


@functools.lru_cache(maxsize=4)
def load_tokenizer(name: str, key: str, error: type[FedkeepError]) -> Any:
    """Return the tokenizer in a folder, or of a model on the hub."""
    folder = Path(name).expanduser()
    if folder.is_dir() and not any(path for pattern in _TOKENIZERS for path in folder.glob(pattern)):
        raise error(f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)})", key=key, value=name)
    return load_files("AutoTokenizer", name, key, error)


def tokenizer_identity(tokenizer: Any) -> str:
    """Return the kind of a tokenizer and a hash of its vocabulary; the same wherever its files are."""
    ids = sorted(tokenizer.get_vocab().items())
    kind = type(tokenizer).__name__.removesuffix("Fast")  # which versions of the library add and leave out
    return f"{kind}#{hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]}"


def _require_safetensors(folder: Path, key: str, error: type[FedkeepError]) -> None:
    if any(folder.glob("*.safetensors")):
        return
    others = [path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))]
    found = f"only {others[0]}, which may be a pickle and is never loaded" if others else "none at all"
    raise error(f"{folder} has no weights in a safetensors file ({found})", key=key, value=str(folder))


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Switch off the progress bars and reports of the library."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
