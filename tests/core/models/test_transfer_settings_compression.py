import pytest

from core.errors import ConfigError
from core.models.transfer_settings import Compression, parse_compression


def test_every_algorithm_is_found_by_its_name() -> None:
    assert [parse_compression(str(one)) for one in Compression] == list(Compression)


@pytest.mark.parametrize("name", ["lz4", "zstd-best-compression", "ZSTD", ""])
def test_names_that_kopia_deprecated_or_does_not_have_are_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=f'must be one of none, zstd-fastest, .*: "{name}"'):
        parse_compression(name)
