"""Positions have no shared cases: their operators go from integers to integers."""

from support.case import OperatorCase

CASES: list[OperatorCase] = []
