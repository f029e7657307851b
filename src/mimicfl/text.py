"""Text for display: counts in words, and text from untrusted files made safe."""

import unicodedata

from .errors import UsageError

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control and format characters (ANSI escapes, text direction), lone surrogates, odd line ends


def visible(text: str, keep: str = "\n\t") -> str:
    """Escape invisible characters, so that a name can neither move the cursor nor hide the text that follows it."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if c not in keep and unicodedata.category(c) in _HIDDEN else c for c in text)


def for_spreadsheet(text: str) -> str:
    """Text that a spreadsheet shows unchanged: neither a formula nor hidden characters.

    >>> for_spreadsheet("=1+1")
    "'=1+1"
    """
    text = visible(text, keep="")
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def without_nul(what: str, text: str) -> str:
    """Return the text if it can be part of a path, else raise a `UsageError`; system calls would raise a bare ValueError for NUL."""
    if "\0" in text:
        raise UsageError(f"{what} must not contain the character NUL, got {text!r}; remove it")
    if any("\ud800" <= c <= "\udfff" for c in text):  # bytes of the command line that are not UTF-8
        raise UsageError(f"{what} must be valid UTF-8, got {text!r}; rename the file or remove the character")
    return text


def counted(n: int, noun: str) -> str:
    """`1 seed`, `2 seeds`."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
