"""Names what a program's rotation does wrong: :func:`posembed.diagnose`, programs, golden files."""

from posembed.diagnosis.golden import Golden, golden
from posembed.diagnosis.observation import Recorded
from posembed.diagnosis.programs import of_cache, of_onnx, of_transformers, recorded
from posembed.diagnosis.verdict import Diagnosis, diagnose

__all__ = [
    "Diagnosis",
    "Golden",
    "Recorded",
    "diagnose",
    "golden",
    "of_cache",
    "of_onnx",
    "of_transformers",
    "recorded",
]
