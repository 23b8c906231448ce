import pytest

from tests.ad.broken_modes import MODES, PARAMETERS, compare, loss


@pytest.fixture(scope="module")
def comparison():
    return compare(loss, PARAMETERS, 2, modes=MODES)
