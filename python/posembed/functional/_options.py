"""Literal types of options that several functions share."""

from __future__ import annotations

from typing import Literal

Layout = Literal["bshd", "bhsd", "sbhd", "thd"]
CacheLayout = Literal["nhd", "hnd"]
Gradient = Literal["dense", "rows"]
BagMode = Literal["sum", "mean", "max"]
Initialization = Literal["mean", "mean-and-covariance", "normal"]
