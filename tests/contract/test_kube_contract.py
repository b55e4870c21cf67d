"""The fake API server keeps the contract (the real one: `tests/integration/test_kube_contract.py`)."""

import pytest

from tests.contract.bench import Bench
from tests.contract.kube_contract import KubeContract
from tests.support.fakekube import FakeKube


class TestFakeKube(KubeContract):
    @pytest.fixture
    def bench(self) -> Bench:
        return Bench(FakeKube(), "test")
