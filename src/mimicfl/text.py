"""Makes text from untrusted files safe to display."""

import unicodedata

from .errors import UsageError

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control and format characters (ANSI escapes, text direction), lone surrogates, odd line ends


def visible(text: str, keep: str = "\n\t") -> str:
    """The text with invisible characters escaped, so that a name can neither move the cursor nor hide what follows it."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if c not in keep and unicodedata.category(c) in _HIDDEN else c for c in text)


def without_nul(what: str, text: str) -> str:
    """The text, if it can be part of a path: system calls raise a bare ValueError for the character NUL."""
    if "\0" in text:
        raise UsageError(f"{what} must not contain the character NUL, got {text!r}; remove it")
    if any("\ud800" <= c <= "\udfff" for c in text):  # bytes of the command line that are not UTF-8
        raise UsageError(f"{what} must be valid UTF-8, got {text!r}; rename the file or remove the character")
    return text


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
