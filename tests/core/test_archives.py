"""NumPy files that anybody may have written: nothing is allocated that is not there, nothing is unpickled."""

import io
import zipfile
from contextlib import suppress

import numpy as np
import pytest

from dappr_llm.core import archives
from dappr_llm.core.archives import load_npy, load_npz
from dappr_llm.core.errors import UserError


def header(shape, dtype="<f4", version=(1, 0)):
    """The start of a `.npy` file that announces an array."""
    out = io.BytesIO()
    write = np.lib.format.write_array_header_1_0 if version == (1, 0) else np.lib.format.write_array_header_2_0
    write(out, {"descr": dtype, "fortran_order": False, "shape": shape})
    return out.getvalue()


def pack(path, how=zipfile.ZIP_DEFLATED, **members):
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


@pytest.fixture
def no_arrays(monkeypatch):
    monkeypatch.setattr(np.lib.format, "read_array", lambda *_, **__: pytest.fail("an array was read"))


def test_archives_are_read_as_numpy_reads_them(tmp_path):
    arrays = {
        "a": np.arange(6.0).reshape(2, 3),
        "b": np.array(["x", "yz"]),
        "c": np.zeros((0, 4)),
        "d": np.array("{}"),
    }
    arrays["e"] = np.asfortranarray(arrays["a"])
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        found = load_npz(tmp_path / "a.npz")
        assert found.keys() == arrays.keys() and all((found[name] == arrays[name]).all() for name in arrays)
    assert load_npz(tmp_path / "a.npz", ["b"]).keys() == {"b"}
    np.save(tmp_path / "a.npy", arrays["a"])
    assert (load_npy(tmp_path / "a.npy") == arrays["a"]).all()


def test_a_bomb_is_not_unpacked(tmp_path, no_arrays):
    data = header((75_000_000,)) + bytes(300_000_000)
    path = pack(tmp_path / "bomb.npz", probs=data)
    assert path.stat().st_size < 500_000
    with pytest.raises(ValueError, match=r"would unpack to 300,000,\d+ bytes; at most 268,435,456"):
        load_npz(path)


def test_a_stated_limit_holds_for_all_arrays_together(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.zeros(100), b=np.zeros(100))
    assert len(load_npz(tmp_path / "a.npz", limit=2000)) == 2
    with pytest.raises(ValueError, match="would unpack to"):
        load_npz(tmp_path / "a.npz", limit=1500)


@pytest.mark.parametrize("shape", [(10**15,), (2**40, 2**40), (3,), (0,), (-1, -4), (2**31,) * 20, (1,) * 40])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_a_header_announces_what_is_there(tmp_path, no_arrays, shape, version):
    data = header(shape, version=version) + bytes(16)
    with pytest.raises(ValueError, match="header"):
        load_npz(pack(tmp_path / "a.npz", probs=data))
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(ValueError, match="header"):
        load_npy(tmp_path / "a.npy")


@pytest.mark.parametrize(
    "data",
    [
        header((4,), "|O") + bytes(32),
        header((10**12,), "<U0"),
        b"\x80\x04K\x01.",  # a pickle
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x09\x00" + bytes(100),
        b"\x93NUMPY\x01\x00\x20\x00" + b"{'descr': " + b"(" * 22,
        b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{}",
    ],
)
def test_pickles_and_damaged_headers_are_refused(tmp_path, no_arrays, data):
    with pytest.raises(ValueError):
        load_npz(pack(tmp_path / "a.npz", probs=data))
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(ValueError):
        load_npy(tmp_path / "a.npy")


def test_archives_that_numpy_does_not_write(tmp_path, monkeypatch, no_arrays):
    data = header((2,)) + bytes(8)
    with pytest.raises(ValueError, match="packed in a way"):
        load_npz(pack(tmp_path / "lzma.npz", zipfile.ZIP_LZMA, a=data))
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(tmp_path / "twice.npz", "w") as archive:
        archive.writestr("a.npy", data)
        archive.writestr("a.npy", data)
    with pytest.raises(ValueError, match="same name"):
        load_npz(tmp_path / "twice.npz")
    monkeypatch.setattr(archives, "_MOST_MEMBERS", 2)
    with pytest.raises(ValueError, match="more than 2"):
        load_npz(pack(tmp_path / "many.npz", a=data, b=data, c=data))
    for content in (b"", b"PK\x03\x04", b"x" * 100):
        (tmp_path / "no.npz").write_bytes(content)
        with pytest.raises(ValueError):
            load_npz(tmp_path / "no.npz")
    with pytest.raises(UserError, match="not a regular file"):
        load_npz(tmp_path)


@pytest.mark.parametrize("seed", range(30))
def test_damaged_archives_never_raise_anything_else(tmp_path, seed):
    rng = np.random.default_rng(seed)
    out = io.BytesIO()
    np.savez_compressed(out, a=rng.random((20, 3)), b=np.array(["x"] * 20))
    data = bytearray(out.getvalue())
    for _ in range(rng.integers(1, 6)):
        data[rng.integers(len(data))] = rng.integers(256)
    (tmp_path / "a.npz").write_bytes(bytes(data))
    with suppress(ValueError):
        load_npz(tmp_path / "a.npz")
