"""Whole tensors: copied when they are seen, digested and written to the spool behind the loop."""

from .capture import Capture, room_of

__all__ = ["Capture", "room_of"]
