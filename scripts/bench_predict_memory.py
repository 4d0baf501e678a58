"""
Peak memory and speed of `dappr predict` over synthetic Parquet shards, for several numbers of rows.

    python scripts/bench_predict_memory.py --rows 10000 1000000

Each size runs in its own process with a model of one layer, so that memory and time are those of the pipeline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scriptlib import arguments

ROOT = Path(__file__).resolve().parent.parent
SHARD = 50_000
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def prepare(folder: Path) -> None:
    """Save a base model of one layer, and an untrained adapter for it."""
    from peft import LoraConfig
    from tiny import WORDS, build_tokenizer, make_rows
    from transformers import MistralConfig, MistralForCausalLM

    from dappr_llm import DAPPrConfig, DAPPrTrainer

    shape = MistralConfig(
        vocab_size=max(80, len(WORDS) + 8), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, bos_token_id=2,
        eos_token_id=2,
    )  # fmt: skip
    MistralForCausalLM(shape).save_pretrained(folder / "base")
    build_tokenizer().save_pretrained(folder / "base")
    args = DAPPrConfig(
        str(folder / "run"), report_to="none", prompt={"template": "{question}\n{choices}\nAnswer:"}, max_length=48
    )
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    DAPPrTrainer(str(folder / "base"), args, make_rows(8), peft_config=lora).save_model()


def write_shards(folder: Path, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    kinds = ["fruit", "tool", "colour"]
    for number, start in enumerate(range(0, rows, SHARD)):
        ids = range(start, min(start + SHARD, rows))
        columns = {
            "id": [str(i) for i in ids],
            "question": [f"Which one is a {kinds[i % 3]} ?" for i in ids],
            "choices": [["plum", "saw", "red", "sky"][i % 4 :] + ["plum", "saw", "red", "sky"][: i % 4] for i in ids],
        }
        pq.write_table(pa.table(columns), folder / f"part-{number:04d}.parquet", row_group_size=5_000)


def measure(folder: Path, rows: int, batch: int) -> dict[str, float]:
    """Run `dappr predict` in a child process; returns its peak resident memory (MiB) and its wall-clock seconds."""
    task, out = folder / f"in-{rows}", folder / f"out-{rows}"
    write_shards(task, rows)
    code = (
        "import json, resource, sys, time; begun = time.monotonic(); from dappr_llm.commands.main import main;"
        "code = main(sys.argv[1:]); peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "print(json.dumps({'peak': peak, 'seconds': time.monotonic() - begun})); raise SystemExit(code)"
    )
    command = ["predict", str(folder / "run"), "--task", str(task), "--out", str(out), "--batch-size", str(batch)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *command], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    unit = 1 if sys.platform == "darwin" else 1024
    return {"mib": found["peak"] * unit / 2**20, "seconds": found["seconds"]}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--batch-size", type=int, default=256)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        first = None
        for rows in args.rows:
            begun = time.monotonic()
            found = measure(folder, rows, args.batch_size)
            first = first or found["mib"]
            print(
                f"{rows:>9,} rows: peak {found['mib']:.0f} MiB ({found['mib'] / first - 1:+.1%}), "
                f"{found['seconds']:.0f} s ({rows / found['seconds']:.0f} rows/s with start-up), "
                f"{time.monotonic() - begun:.0f} s with making the rows",
                flush=True,
            )


if __name__ == "__main__":
    main()
