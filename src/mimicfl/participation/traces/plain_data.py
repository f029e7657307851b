"""Read a pickle that holds nothing but plain data: numbers, strings, lists and dictionaries.

Python's own unpickler can run any program that a file names. This reader knows only the opcodes of plain data and refuses all others, so
that a file can never run code.
"""

import struct
from collections.abc import Callable
from typing import Any

from ...errors import UsageError

MARK = object()
_SIZED: dict[int, tuple[str, str]] = {  # opcode: (format of its argument or of its length, kind)
    ord("K"): ("<B", "number"),
    ord("M"): ("<H", "number"),
    ord("J"): ("<i", "number"),
    ord("G"): (">d", "number"),
    ord("\x8c"): ("<B", "text"),
    ord("X"): ("<I", "text"),
    ord("\x8d"): ("<Q", "text"),
    ord("\x8a"): ("<B", "long"),
    ord("\x8b"): ("<I", "long"),
}
_CONSTANTS = {ord("N"): None, ord("\x88"): True, ord("\x89"): False}


def read_plain_pickle(data: bytes, where: str) -> Any:
    """The value that a pickle of plain data holds; anything else is refused."""
    try:
        return _Reader(data).value()
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except (struct.error, IndexError, KeyError, ValueError, TypeError, AttributeError, UnicodeDecodeError, OverflowError):
        raise UsageError(f"{where} is not a pickle of plain data, or it is damaged") from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.stack, self.memo = data, 0, list[Any](), dict[int, Any]()

    def value(self) -> Any:
        actions = self._actions()
        while True:
            code = self.data[self.at]
            self.at += 1
            if code == ord("."):
                [found] = self.stack
                return found
            if sized := _SIZED.get(code):
                self.stack.append(self._sized(*sized))
            elif code in _CONSTANTS:
                self.stack.append(_CONSTANTS[code])
            elif action := actions.get(code):
                action()
            else:
                raise UsageError(
                    f"the pickle contains more than plain data (opcode {chr(code)!r} at byte {self.at - 1}); it is refused, since it could "
                    "run any program"
                )

    def _actions(self) -> dict[int, Callable[[], None]]:
        push = self.stack.append
        return {
            0x80: lambda: self._skip(1),  # protocol
            0x95: lambda: self._skip(8),  # frame
            ord("("): lambda: push(MARK),
            ord("]"): lambda: push([]),
            ord("}"): lambda: push({}),
            ord(")"): lambda: push(()),
            ord("l"): lambda: push(self._marked()),
            ord("t"): lambda: push(tuple(self._marked())),
            ord("d"): lambda: push(_pairs(self._marked())),
            0x85: lambda: push(tuple(self._last(1))),
            0x86: lambda: push(tuple(self._last(2))),
            0x87: lambda: push(tuple(self._last(3))),
            ord("a"): lambda: self._extend(self._last(1)),
            ord("e"): lambda: self._extend(self._marked()),
            ord("s"): lambda: self._update(self._last(2)),
            ord("u"): lambda: self._update(self._marked()),
            ord("q"): lambda: self._remember(self._number("<B")),
            ord("r"): lambda: self._remember(self._number("<I")),
            ord("p"): lambda: self._remember(int(self._line())),
            0x94: lambda: self._remember(len(self.memo)),
            ord("h"): lambda: push(self.memo[self._number("<B")]),
            ord("j"): lambda: push(self.memo[self._number("<I")]),
            ord("g"): lambda: push(self.memo[int(self._line())]),
            ord("I"): lambda: push(_integer(self._line())),
            ord("L"): lambda: push(int(self._line().rstrip("L"))),
            ord("F"): lambda: push(float(self._line())),
            ord("V"): lambda: push(self._line("raw-unicode-escape")),
            ord("S"): lambda: push(self._line().strip("'\"")),
            ord("0"): lambda: self._drop(),
        }

    def _skip(self, count: int) -> None:
        self.at += count

    def _drop(self) -> None:
        self.stack.pop()

    def _number(self, form: str) -> Any:
        (found,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def _sized(self, form: str, kind: str) -> Any:
        found = self._number(form)
        if kind == "number":
            return found
        if found > len(self.data) - self.at:
            raise ValueError
        raw = self.data[self.at : self.at + found]
        self.at += found
        return raw.decode("utf-8", "surrogatepass") if kind == "text" else int.from_bytes(raw, "little", signed=True)

    def _line(self, encoding: str = "ascii") -> str:
        end = self.data.index(b"\n", self.at)
        line, self.at = self.data[self.at : end].decode(encoding), end + 1
        return line

    def _last(self, count: int) -> list[Any]:
        found = self.stack[-count:]
        del self.stack[-count:]
        if len(found) < count or any(item is MARK for item in found):
            raise ValueError
        return found

    def _marked(self) -> list[Any]:
        where = len(self.stack) - 1
        while self.stack[where] is not MARK:
            where -= 1
            if where < 0:
                raise ValueError
        found = self.stack[where + 1 :]
        del self.stack[where:]
        return found

    def _extend(self, items: list[Any]) -> None:
        self.stack[-1].extend(items)

    def _update(self, items: list[Any]) -> None:
        self.stack[-1].update(_pairs(items))

    def _remember(self, key: int) -> None:
        self.memo[key] = self.stack[-1]


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _integer(text: str) -> int | bool:
    return {"00": False, "01": True}.get(text, False) if text in ("00", "01") else int(text)
