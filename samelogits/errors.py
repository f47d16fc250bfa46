"""The errors that a user of the package can meet. Each message is one line: what was expected, what was found."""

import re
import warnings


def shown(value: object, limit: int = 80) -> str:
    """The value as one short line for an error message."""
    if type(value) is str:  # one line, and no code of another package
        text = repr(value)
    else:
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns of what a pickle may hold
            text = re.sub(r"\n\s*", " ", repr(value))  # that of an array has several lines
    return text if len(text) <= limit else f"{text[:limit]}..."


class SamelogitsError(ValueError):
    """Base of every error raised for bad input; the command line turns it into one line and exit status 2."""


class ConfigError(SamelogitsError):
    """A decoder configuration that is contradictory, or a foreign one that is not understood."""


class CheckpointError(SamelogitsError):
    """A file or directory that is not the checkpoint it claims to be."""


class InputError(SamelogitsError):
    """Token ids, targets, masks or settings outside their range."""


class BackendError(SamelogitsError):
    """A backend, device, dtype or arithmetic that is not available here."""


class CandidateError(SamelogitsError):
    """A candidate that can't be compared: it raised, or returned something else than logits and taps."""
