"""
Build sdist and wheel, install the wheel into an empty environment, and train a tiny model there.

    make wheel-check
    python scripts/check_wheel.py --keep        # leave build/wheel-check behind, to inspect it

The wheel must hold every file of the package and of `recipes/`, and nothing else. Commands run in another folder and
without PYTHONPATH, so that nothing is imported from the checkout. uv installs; where its cache has the wheels already,
it only makes hard links.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scriptlib import arguments

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "wheel-check"  # on the same disk as .venv, where hard links to uv's cache are likely to work
GIB = 1 << 30
# Free disk space for the environment: hard links take almost nothing, copies as much as torch and the rest do.
LINKED, COPIED = 1 * GIB, 8 * GIB
MAKE_INPUTS = """
from pathlib import Path
from tiny import build_model, build_tokenizer, make_rows, write_recipe

build_model().save_pretrained("base")
build_tokenizer().save_pretrained("base")
splits = {name: make_rows(12, start) for name, start in {"train": 0, "validation": 20, "test": 40}.items()}
write_recipe(Path.cwd(), Path.cwd() / "base", splits, make_rows(8, 60, options=5), num_train_epochs=1)
"""


class CheckError(Exception):
    """A failed check; the message names it."""


def run(command: Sequence[str | Path], folder: Path = ROOT) -> str:
    """Stdout of a command that must succeed; it runs without PYTHONPATH and with the Hub offline."""
    # Bytecode files are allowed, so that later commands need not compile the packages again.
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    parts = [str(part) for part in command]
    done = subprocess.run(parts, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise CheckError(f"`{' '.join(parts)}` failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


@contextmanager
def timed(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"{what:<44} {time.perf_counter() - start:6.1f} s", flush=True)


def check_disk(uv: str) -> None:
    """Check free disk space first: a disk that fills up during installation causes misleading errors."""
    cache = Path(run([uv, "cache", "dir"]).strip())
    cache = next(path for path in (cache, *cache.parents) if path.exists())
    needed = LINKED if cache.stat().st_dev == FOLDER.stat().st_dev else COPIED
    free = shutil.disk_usage(FOLDER).free
    if free < needed:
        raise CheckError(f"{FOLDER}: {free / GIB:.1f} GiB of disk space are free; the check needs {needed // GIB} GiB")


def build() -> Path:
    """Build the wheel from the sdist, so that a file missing in the sdist is missing in the wheel too."""
    run([sys.executable, "-m", "build", "--installer", "uv", "--outdir", FOLDER / "dist", ROOT])
    (wheel,) = (FOLDER / "dist").glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> int:
    """Compare the wheel with the checkout; return its number of files."""
    options = ("--cached", "--others", "--exclude-standard")
    listed = run(["git", "ls-files", *options, "dappr_llm", "recipes"]).splitlines()
    wanted = {
        f"dappr_llm/{name}" if name.startswith("recipes/") else name for name in listed if (ROOT / name).is_file()
    }
    names = zipfile.ZipFile(wheel).namelist()
    found = {name for name in names if ".dist-info/" not in name}
    if found != wanted:
        missing, other = sorted(wanted - found), sorted(found - wanted)
        raise CheckError(f"{wheel.name} lacks {missing[:5]} and holds {other[:5]}; see package-data in pyproject.toml")
    return len(names)


def install(uv: str, wheel: Path) -> Path:
    """Install the wheel and its dependencies, without extras, into a new environment; return its `bin` folder."""
    environment = FOLDER / "environment"
    run([uv, "venv", "--quiet", "--python", sys.executable, environment])
    commands = environment / ("Scripts" if os.name == "nt" else "bin")
    constraints = ROOT / "constraints.txt"
    run([uv, "pip", "install", "--quiet", "--python", commands / "python", "-c", constraints, wheel])
    return commands


def check_recipes(commands: Path, work: Path) -> int:
    """Check that `dappr recipes` lists the shipped recipes; return its number of lines."""
    place = Path(run([commands / "python", "-c", "import dappr_llm; print(dappr_llm.__file__)"], work).strip())
    if commands.parent not in place.parents:
        raise CheckError(f"dappr_llm was imported from {place}, not from the new environment")
    lines = run([commands / "dappr", "recipes"], work).splitlines()
    for name in ("quickstart", "digits/dappr", "obqa_mistral7b/dappr"):
        found = run([commands / "dappr", "recipes", name], work)  # a full name shows its file and merged values
        if f"dappr train {name}" not in found or "method:" not in found:
            raise CheckError(f"`dappr recipes {name}` does not show that recipe:\n{found[:1000]}")
    return len(lines)


def check_training(commands: Path, work: Path) -> float:
    """Train a tiny causal LM, check that results, report and model card are written; return its test accuracy."""
    shutil.copy(ROOT / "tests" / "tiny.py", work)
    run([commands / "python", "-c", MAKE_INPUTS], work)
    run([commands / "dappr", "train", work / "recipe.yaml"], work)
    run([commands / "dappr", "report", work / "run"], work)
    for name in ("adapter_model.safetensors", "README.md", "report/report.html"):
        if not (work / "run" / name).is_file():
            raise CheckError(f"`dappr train` and `dappr report` left no {name}")
    accuracy = json.loads((work / "run" / "results.json").read_text())["results"]["id/accuracy"]
    if not math.isfinite(accuracy):
        raise CheckError(f"results.json: accuracy is {accuracy}")
    return accuracy


def check(uv: str) -> None:
    """All steps in order; the first that fails ends the check."""
    work = FOLDER / "work"
    shutil.rmtree(FOLDER, ignore_errors=True)
    work.mkdir(parents=True)
    check_disk(uv)
    with timed("sdist and wheel built"):
        wheel = build()
    print(f"{wheel.name}: {check_contents(wheel)} files, as in the checkout")
    with timed("wheel installed into an empty environment"):
        commands = install(uv, wheel)
    with timed("dappr recipes"):
        check_recipes(commands, work)
    with timed("dappr train, dappr report"):
        accuracy = check_training(commands, work)
    print(f"the wheel works: a tiny model was trained and tested (accuracy {accuracy:.2f})")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--keep", action="store_true", help="do not delete build/wheel-check")
    args = parser.parse_args()
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        print("check_wheel: uv is missing: pip install uv", file=sys.stderr)
        return 1
    try:
        check(uv)
    except CheckError as error:
        print(f"check_wheel: {error}", file=sys.stderr)
        return 1
    finally:
        if not args.keep:
            shutil.rmtree(FOLDER, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
