"""What tests of patched models share."""

from collections.abc import Iterator

import pytest
from torch import nn


@pytest.fixture(autouse=True)
def the_models_own_code_afterwards() -> Iterator[None]:
    """A patch is the process's: no test sees that of another."""
    from posembed.integrations.huggingface import _door

    yield
    for users in list(_door._users.values()):
        users.clear()
    _door.restore(nn.Module())
