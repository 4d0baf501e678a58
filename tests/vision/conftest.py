import pytest


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path, monkeypatch):
    """Verified image sets are remembered in the cache folder: not in the user's."""
    monkeypatch.setenv("DAPPR_CACHE", str(tmp_path / "cache"))
