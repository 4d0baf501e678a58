"""
Schemas of every file that is read: types, ranges and versions, stated once, and one form of error.

`check(schema, values, where)` gives back what a file said, or raises a `UserError` that names the file, the key, what
was found, what is allowed and the nearest valid form. Imports pydantic and nothing slow, so that a bad value is
answered before torch is loaded.
"""

from __future__ import annotations

from .check import check, json_schema

__all__ = ["check", "json_schema"]
