"""Text for messages: lists of names, suggestions for a misspelt name, and means with their spread."""

from __future__ import annotations

import difflib
import math
import statistics
import unicodedata
from collections.abc import Callable, Iterable, Sequence


def did_you_mean(word: str, valid: Iterable[str], section: str = "") -> str:
    """Return the closest valid name as a suggestion, and the list of all, shortened if it is long.

    The suggestion is written with its `section`, as in an override; the list is not.

    >>> did_you_mean("fedntf", ["fedavg", "fedntd"])
    'did you mean fedntd? (valid: fedavg, fedntd)'
    >>> did_you_mean("xyz", ["fedavg", "fedntd"])
    'valid: fedavg, fedntd'
    >>> did_you_mean("rouns", ["lr", "rounds"], "train")
    'did you mean train.rounds? (valid: lr, rounds)'
    """
    valid = list(valid)
    close = difflib.get_close_matches(str(word).lower(), valid, n=1)
    listing = f"valid: {list_some(valid, most=30)}"
    prefix = f"{section}." if section else ""
    return f"did you mean {prefix}{close[0]}? ({listing})" if close else listing


def join_names(names: Sequence[str]) -> str:
    """Join names as in a sentence.

    >>> join_names(["a", "b", "c"])
    'a, b and c'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def list_some(names: Sequence[str], most: int = 12) -> str:
    """List names for a message; of many, the first few and their number."""
    shown = ", ".join(" ".join(str(name).split())[:80] for name in names[:most])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > most else shown or "none"


def printable(text: object) -> str:
    """Return text that is safe to show: control characters and text-direction marks are written as escapes.

    >>> print(printable(chr(27) + "[31mred"))
    \\x1b[31mred
    """
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in hidden else c for c in str(text))


def clip(text: str, most: int) -> str:
    """Cut a text to at most this many characters; the last one then is an ellipsis.

    >>> clip("a long name", 6), clip("short", 6)
    ('a lon…', 'short')
    """
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def short_name(name: object, most: int = 24) -> str:
    """Return the name of a class or a client, which may contain anything, on one line and safe to show.

    >>> short_name("  a\\x1b[31m\\nvery long name of a hospital "), short_name("Bonn")
    ('a\\\\x1b[31m very long nam…', 'Bonn')
    """
    return clip(printable(" ".join(str(name).split())), most)


def one_line(error: BaseException | str, most: int = 240) -> str:
    """Return a message on one line of at most this many characters; what a terminal would obey is escaped.

    >>> one_line(ValueError("two\\n  lines \\x1b[31m"))
    'two lines \\\\x1b[31m'
    """
    text = " ".join(str(error)[: 8 * most].split())  # the text of a node may be very long
    if not text and isinstance(error, BaseException):
        text = type(error).__name__
    text = printable(text)
    return text if len(text) <= most else text[: most - 3] + "..."


def format_layer(name: str) -> str:
    """Return what a message calls a layer; the name of the whole model is empty.

    >>> format_layer("body.2"), format_layer("")
    ('layer body.2', 'the model')
    """
    return f"layer {name}" if name else "the model"


def format_os_error(error: OSError) -> str:
    """Return what the system refused, with the file.

    >>> format_os_error(FileNotFoundError(2, "No such file or directory", "x.toml"))
    'x.toml: No such file or directory'
    """
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror or one_line(error)}"


def format_value(value: object, most: int = 200) -> str:
    """Return a value for a message, shortened if it is long; an object whose text has several lines by its type.

    >>> format_value("abc"), format_value(16**5000)
    ("'abc'", 'a number of 20001 bits')
    """
    try:
        text = repr(value)
    except ValueError:  # Python does not write integers of more than 4300 digits
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    if "\n" in text:  # a table or an array
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def format_mean(mean: float, spread: float | None, digits: int, scale: float = 1.0) -> str:
    """Format mean±standard deviation; without a spread (None or NaN), the mean alone.

    >>> format_mean(0.6, 0.1414, 1, scale=100), format_mean(0.5, float("nan"), 2)
    ('60.0±14.1', '0.50')
    """
    text = f"{mean * scale:.{digits}f}"
    return text if spread is None or math.isnan(spread) else f"{text}±{spread * scale:.{digits}f}"


def format_reached(values: Sequence[float | None], format: Callable[[float], str] = "{:g}".format) -> str:
    """Format the median of what several runs needed to reach something; None (not reached) counts as the most.

    >>> format_reached([3, 5, 8]), format_reached([3, 5, None]), format_reached([3, None, None]), format_reached([None])
    ('5', '5 (2 of 3)', '- (1 of 3)', '-')
    """
    reached = [value for value in values if value is not None]
    median = statistics.median(math.inf if value is None else value for value in values)
    some = f" ({len(reached)} of {len(values)})" if 0 < len(reached) < len(values) else ""
    return (format(median) if math.isfinite(median) else "-") + some


def format_megabytes(size: float) -> str:
    """Format bytes as megabytes, with two digits or more.

    >>> format_megabytes(5_849_600), format_megabytes(12_340), format_megabytes(3_210_000_000)
    ('5.8', '0.012', '3210')
    """
    return f"{size / 1e6:.0f}" if size >= 99.5e6 else f"{size / 1e6:.2g}"
