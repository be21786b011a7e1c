# SPDX-License-Identifier: Apache-2.0
"""Strides of operands, as the parameter structs of kernels want them."""

from __future__ import annotations

from collections.abc import Mapping

from kda_cupy.arrays import ArrayInfo
from kda_cupy.dtypes import INT64


class Strides:
    """What the layouts say of operands: strides in elements, 0 for one that is absent."""

    def __init__(self, infos: Mapping[str, ArrayInfo | None]) -> None:
        """infos: by the operand's name; an absent operand is None or not there."""
        self._infos = infos

    def __call__(self, name: str, axis: int = 0) -> int:
        """Stride of an operand along an axis."""
        info = self._infos.get(name)
        return 0 if info is None else info.stride(axis)

    def of_each(self, names: tuple[str, ...], axis: int, field: str) -> dict[str, int]:
        """Those of q, k and v by their fields' names: ``field`` is ``"cs_{}_slot_stride"`` or its like."""
        return {field.format(letter): self(name, axis) for letter, name in zip("qkv", names, strict=True)}

    def is_64bit(self, name: str) -> int:
        """1 if the index vector is there and holds int64."""
        info = self._infos.get(name)
        return int(info is not None and info.dtype == INT64)
