"""Checkpoints from the Hugging Face hub, by the optional package huggingface_hub."""

from __future__ import annotations

import re
from pathlib import Path

from samelogits.errors import CheckpointError, InputError

SCHEME = "hf://"
# Never a pickle and never code; the files of the top folder are the whole checkpoint.
_ALLOWED = ["*.json", "*.safetensors"]
_IGNORED = ["*/*"]
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_]|[.-](?![.-])){0,95}"
_REFERENCE = re.compile(rf"hf://({_NAME}/{_NAME})(?:@([A-Za-z0-9](?:[A-Za-z0-9_/-]|\.(?!\.)){{0,127}}))?")


def download(reference: str) -> Path:
    """The local folder with the JSON and safetensors files of "hf://owner/name[@revision]", fetched where not cached.

    Raises InputError for a malformed reference and without the package, CheckpointError where the hub doesn't answer
    or has no such checkpoint.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise InputError(f"source: expected hf://owner/name or hf://owner/name@revision, found {reference!r}")
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise InputError(
            f"{reference}: expected the package huggingface_hub, found none: pip install 'samelogits[hf]'"
        ) from None
    name, revision = match.groups()
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=_ALLOWED, ignore_patterns=_IGNORED)
    except errors.GatedRepoError:
        found = "a gated one: accept its terms on the hub and log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        found = "no such repository, or a private one"
    except errors.RevisionNotFoundError:
        found = f"no such revision {revision!r}"
    except errors.LocalEntryNotFoundError:
        found = "neither a connection to the hub nor a local copy"
    except Exception as error:  # the package lets errors of several network libraries through
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        return Path(folder)
    raise CheckpointError(f"{reference}: expected a checkpoint on the Hugging Face hub, found {found}")
