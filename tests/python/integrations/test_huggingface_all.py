"""Patches every model class of the installed transformers, and compares those that run small."""

import os

import pytest

transformers = pytest.importorskip("transformers", minversion="5.0")

from support.transformers_walk import visits  # noqa: E402

# Their rotations are methods, or make their tables themselves.
LEFT = {"seamless_m4t", "vjepa2", "wav2vec2-bert", "wav2vec2-conformer"}
PARTLY = {"edgetam_video", "neucodec", "xcodec2"}
# Small models whose options, not their code, decide that nothing rotates.
IDLE = {"clvp_decoder"}
PARTS = 48
# All take ten minutes of one core: run `make test-transformers` after a change of the integration.
RUN = range(PARTS) if os.environ.get("POSEMBED_ALL_MODELS") else [0]


@pytest.mark.program
@pytest.mark.slow
@pytest.mark.parametrize("part", RUN)
def test_model_classes(part: int) -> None:
    families = tuple(sorted(transformers.CONFIG_MAPPING.keys())[part::PARTS])
    for visit in visits(families):
        where = f"{visit.family} {visit.name}: {visit.why} {visit.compared}"
        assert visit.state != "failed", where
        assert "differs" not in visit.compared, where
        assert "idle" not in visit.compared or visit.family in IDLE, where
        assert visit.state != "left" or visit.family in LEFT, where
        assert visit.state != "partly" or visit.family in PARTLY, where
