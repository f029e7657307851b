"""Text from files and from strangers, made safe to show."""

import unicodedata

from .errors import UsageError

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control and format characters (ANSI escapes, text direction), lone surrogates, odd line ends


def visible(text: str, keep: str = "\n\t") -> str:
    """The text with every character that a screen does not show written as its escape: a name can then neither move the cursor nor
    hide what follows it."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if c not in keep and unicodedata.category(c) in _HIDDEN else c for c in text)


def without_nul(what: str, text: str) -> str:
    """The text, if it can be part of a path: the operating system's calls end with a plain ValueError at the character NUL."""
    if "\0" in text:
        raise UsageError(f"{what} must not hold the character NUL, got {text!r}; remove it")
    return text


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
