import pytest

from tests.ad.broken_modes import MODES, PARAMETERS, compare, loss


@pytest.fixture(scope="session")
def comparison():
    return compare(loss, PARAMETERS, 2, modes=MODES)
