"""Pools of ranks, made when a test first asks for one and kept until the tests end."""

from collections.abc import Iterator

import pytest

from parallel_support.pool import Pool


@pytest.fixture(scope="session")
def _two_ranks() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def _four_ranks() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture
def two_ranks(_two_ranks: Pool) -> Pool:
    return _two_ranks


@pytest.fixture
def four_ranks(_four_ranks: Pool) -> Pool:
    return _four_ranks


@pytest.fixture(params=[2, 4], ids=["two ranks", "four ranks"])
def ranks(request: pytest.FixtureRequest) -> Pool:
    return request.getfixturevalue("_two_ranks" if request.param == 2 else "_four_ranks")
