"""A small trace, for tests of traces."""

import pytest

HEADER = "client,start,end,period\n"
SMALL = HEADER + "a,0,100,1000\na,250,600,1000\nb,900,1000,1000\nb,0,50,1000\nc,,,1000\n"


@pytest.fixture
def small(tmp_path):
    (tmp_path / "small.csv").write_text(SMALL)
    return tmp_path / "small.csv"
