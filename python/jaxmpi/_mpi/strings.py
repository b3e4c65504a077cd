"""Texts to which the C core refers by numbers."""

import ctypes
import functools

import jaxmpi._core as _core


class Text:
    """A text as a parameter of compiled programs, or for reports; never freed. Equal texts are one object."""

    __slots__ = ("buffer", "number", "text")

    def __init__(self, text: str):
        self.text, self.buffer = text, ctypes.create_string_buffer(text.encode())
        self.number = _core.register(ctypes.addressof(self.buffer))

    def __repr__(self) -> str:
        return repr(self.text)


text_of = functools.cache(Text)
