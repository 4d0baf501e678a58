import math
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.evaluation.ensemble_tables import combine
from dappr_llm.evaluation.prediction_table import PredictionTable, entropy

LOGITS = np.array([[2, 0.5, -1, 0], [1, 1.5, -0.5, 0.2], [2.5, -0.5, 0, -1]])
META = {"task": "toy", "num_choices": 4, "task_num_choices": 6, "letters": list("ABCDEF")}


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def make_table(kind="probs", rows=40, width=6, seed=0, meta=None):
    rng = np.random.default_rng(seed)
    num_options = rng.integers(2, width + 1, size=rows)
    labels = np.array([rng.integers(-1, count) for count in num_options])
    arrays = {
        "probs": {"probs": softmax(rng.normal(0, 2, (rows, width)))},
        "alpha": {"alpha": 1 + rng.gamma(1.0, 5.0, (rows, width))},
        "members": {"members": softmax(rng.normal(0, 2, (3, rows, width)))},
    }[kind]
    ids = [f"item-{row}" for row in range(rows)]
    return PredictionTable.from_arrays(ids, labels, num_options=num_options, meta=meta or META, **arrays)


def slow_reading(table, row, count):
    """One row in plain Python: probabilities, aleatoric, epistemic."""
    if table.alpha is not None:
        alpha = [float(value) for value in table.alpha[row][:count]]
        probs = [value / sum(alpha) for value in alpha]
        epistemic = table.meta.get("epistemic_scale", 1.0) * count / sum(alpha)
    elif table.members is not None:
        members = [[float(value) for value in member[row][:count]] for member in table.members]
        members = [[value / sum(member) for value in member] for member in members]
        probs = [sum(column) / len(members) for column in zip(*members, strict=True)]
        spread = sum(-sum(p * math.log(p) for p in member) for member in members) / len(members)
        epistemic = -sum(p * math.log(p) for p in probs) - spread
    else:
        total = sum(float(value) for value in table.probs[row][:count])
        probs = [float(value) / total for value in table.probs[row][:count]]
        epistemic = -sum(p * math.log(p) for p in probs)
    return probs, 1 - max(probs), epistemic


def assert_same(first, second):
    for name in ("ids", "labels", "num_options", "probs", "aleatoric", "epistemic", "alpha", "members"):
        mine, its = getattr(first, name), getattr(second, name)
        if mine is None:
            assert its is None, name
        else:
            assert mine.dtype == its.dtype and mine.tobytes() == its.tobytes() and mine.shape == its.shape, name
    assert first.meta == second.meta


@pytest.mark.parametrize("kind", ["probs", "alpha", "members"])
@pytest.mark.parametrize("slots", ["own", 2, 4, 6])
def test_reading_agrees_with_slow_reference(kind, slots):
    table = make_table(kind, meta={**META, "epistemic_scale": 0.25})
    reading = table.reading(slots)
    for row in range(len(table)):
        count = table.num_options[row] if slots == "own" else slots
        probs, aleatoric, epistemic = slow_reading(table, row, count)
        np.testing.assert_allclose(reading.probs[row, :count], probs, rtol=1e-5)
        assert (reading.probs[row, count:] == 0).all()
        assert reading.aleatoric[row] == pytest.approx(aleatoric, abs=1e-6)
        assert reading.epistemic[row] == pytest.approx(epistemic, abs=1e-6)
        assert reading.num_options[row] == count
        if kind == "alpha":
            np.testing.assert_array_equal(reading.alpha[row, :count], table.alpha[row, :count])
            assert (reading.alpha[row, count:] == 0).all()
    assert (reading.alpha is None) == (kind != "alpha")
    assert reading.epistemic.dtype == reading.probs.dtype == np.float32


def test_number_of_letters_moves_the_epistemic_score():
    table = PredictionTable.from_arrays(["a"], alpha=np.array([[9, 2, 2, 1.5, 1]]), num_options=[4])
    assert table.reading("own").epistemic[0] == pytest.approx(0.2759, abs=5e-5)
    assert table.reading(4).epistemic[0] == pytest.approx(4 / 14.5)
    assert table.reading(5).epistemic[0] == pytest.approx(0.3226, abs=5e-5)


def test_own_uncertainties_of_a_method_survive_its_own_reading_only():
    table = PredictionTable.from_arrays(
        ["a"], probs=np.array([[0.5, 0.3, 0.2]]), num_options=[2], aleatoric=np.array([7.0]), epistemic=np.array([8.0])
    )
    for slots in ("own", 2):
        assert (table.reading(slots).aleatoric[0], table.reading(slots).epistemic[0]) == (7, 8)
    assert table.reading(3).aleatoric[0] == pytest.approx(0.5)
    assert table.reading(3).epistemic[0] == pytest.approx(1.029653, abs=1e-6)


def test_reading_of_underflowed_letters_is_uniform():
    table = PredictionTable.from_arrays(["a"], probs=np.array([[0, 0, 1.0]]), num_options=[2])
    np.testing.assert_allclose(table.reading("own").probs, [[0.5, 0.5, 0]])
    assert table.epistemic[0] == pytest.approx(math.log(2))


def test_aleatoric_keeps_resolution_beyond_float32_confidence():
    table = PredictionTable.from_arrays(["a", "b"], probs=np.array([[1 - 1e-9, 1e-9], [1 - 1e-12, 1e-12]]))
    np.testing.assert_allclose(table.aleatoric, [1e-9, 1e-12], rtol=1e-3)


@pytest.mark.parametrize("slots", [1, 7, "task", 2.0, None])
def test_reading_refuses_other_slots(slots):
    with pytest.raises(UserError, match="from 2 to 6"):
        make_table().reading(slots)


def test_entropy_is_safe_at_zero():
    np.testing.assert_allclose(entropy(np.array([[1.0, 0.0], [0.5, 0.5]])), [0, math.log(2)])


def test_ensemble_of_probabilities_golden():
    tables = [PredictionTable.from_arrays(["a"], [0], softmax(logits)[None]) for logits in LOGITS]
    table = combine(tables)
    np.testing.assert_allclose(table.probs[0], [0.62391049, 0.23257149, 0.05772490, 0.08579313], atol=1e-7)
    assert table.aleatoric[0] == pytest.approx(0.376090, abs=1e-6)
    assert table.epistemic[0] == pytest.approx(0.146984, abs=1e-6)
    assert table.members.shape == (3, 1, 4)


def test_ensemble_of_dirichlets_golden():
    tables = [PredictionTable.from_arrays(["a"], alpha=np.logaddexp(0, logits)[None] + 1) for logits in LOGITS]
    table = combine(tables)
    np.testing.assert_allclose(table.alpha[0], [3.00635981, 2.04985575, 1.49349528, 1.60151591], atol=1e-6)
    assert table.aleatoric[0] == pytest.approx(0.631177, abs=1e-6)
    assert table.epistemic[0] == pytest.approx(0.490724, abs=1e-6)
    assert table.members is None


def test_combine_mixes_dirichlet_and_softmax_as_members():
    dirichlet = PredictionTable.from_arrays(["a"], alpha=np.array([[3.0, 1.0]]))
    plain = PredictionTable.from_arrays(["a"], probs=np.array([[0.25, 0.75]]))
    table = combine([dirichlet, plain])
    assert table.alpha is None
    np.testing.assert_allclose(table.probs, [[0.5, 0.5]])


def test_combine_stacks_passes_and_lists_differing_facts():
    tables = [make_table("members", meta={**META, "seed": seed}) for seed in (1, 2)]
    table = combine(tables)
    assert len(table.members) == 6
    assert table.meta["seed"] == [1, 2] and table.meta["task"] == "toy" and table.meta["ensemble"] == 2


def test_combine_names_the_first_difference():
    table = make_table()
    other = make_table()
    other.ids[3] = "other"
    with pytest.raises(UserError, match=r"Table 3 differs .* ids\[3\]: other against item-3"):
        combine([table, table, other])
    other = make_table()
    row = int(np.argmax(other.labels == 0))
    other.labels[row] = 1
    with pytest.raises(UserError, match=rf"labels\[{row}\]: 1 against 0"):
        combine([table, other])
    other = make_table()
    other.num_options[0] += 1
    with pytest.raises(UserError, match=r"num_options\[0\]"):
        combine([table, other])
    with pytest.raises(UserError, match="items and letters"):
        combine([table, make_table(width=5)])
    with pytest.raises(UserError, match="items and letters"):
        combine([table, table.select([0, 1])])
    with pytest.raises(UserError, match=r"epistemic_scale: 2\.0 against None"):
        combine([table, make_table(meta={**META, "epistemic_scale": 2.0})])
    with pytest.raises(UserError, match=r"different numbers of members: \[1, 3\]"):
        combine(
            [
                table,
                PredictionTable.from_arrays(
                    table.ids,
                    table.labels,
                    num_options=table.num_options,
                    members=np.stack([table.probs] * 3),
                    meta=META,
                ),
            ]
        )
    with pytest.raises(UserError, match="at least one"):
        combine([])


def test_from_arrays_fills_in_defaults():
    table = PredictionTable.from_arrays(["a", "b"], members=np.array([[[1, 0], [0, 1]], [[0, 1], [0, 1]]]))
    np.testing.assert_array_equal(table.probs, [[0.5, 0.5], [0, 1]])
    np.testing.assert_array_equal(table.labels, [-1, -1])
    np.testing.assert_array_equal(table.num_options, [2, 2])
    np.testing.assert_allclose(table.epistemic, [math.log(2), 0], atol=1e-7)
    with pytest.raises(UserError, match="needs probs, alpha or members"):
        PredictionTable.from_arrays(["a"])


GOOD = {
    "ids": ["a", "b", "c"],
    "labels": [0, 1, -1],
    "probs": [[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]],
    "num_options": [3, 2, 3],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": [0, 1]}, r"labels has shape \(2,\)"),
        ({"labels": [0.0, 1.0, 2.0]}, "labels must be integers"),
        ({"labels": [0, 2, 0]}, r"label .* \(first: b\)"),
        ({"labels": [0, 0, -2]}, r"label .* \(first: c\)"),
        ({"ids": ["a", "b", "b"]}, "b appears more than once"),
        ({"num_options": [3, 2, 4]}, r"between 2 and 3 \(first: c\)"),
        ({"num_options": [1, 2, 3]}, r"between 2 and 3 \(first: a\)"),
        ({"probs": [[0.5, 0.3, 0.2], [0.1, 0.8, 0.102], [0.2, 0.2, 0.6]]}, r"sum to 1 \(first: b\)"),
        ({"probs": [[1.5, -0.5, 0], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]}, r"negative .* \(first: a\)"),
        ({"probs": [0.5, 0.5]}, r"probs \[N, W\]"),
        ({"probs": [["x"] * 3] * 3}, "probs must be real numbers"),
        ({"alpha": [[1, 1, 1], [1, 0, 1], [1, 1, 1]]}, r"alpha is not positive \(first: b\)"),
        ({"alpha": [[1, 1]] * 3}, r"alpha has shape \(3, 2\)"),
        ({"members": [[[1, 0, 0]] * 2]}, r"members has shape \(1, 2, 3\)"),
        ({"members": np.zeros((0, 3, 3))}, r"members has shape \(0, 3, 3\)"),
        ({"members": [[[1, 0, 0], [1, 0, 0], [1, 1, 0]]]}, r"members .* \(first: c\)"),
        ({"epistemic": [0.0, math.inf, math.nan]}, r"2 of 3 rows hold NaN or Inf \(first: b, c\)"),
        ({"meta": ["not", "a", "dict"]}, "meta must be a JSON object"),
    ],
)
def test_contradictions_are_named(changes, message):
    PredictionTable.from_arrays(**GOOD)
    with pytest.raises(UserError, match=message):
        PredictionTable.from_arrays(**{**GOOD, **changes})


def test_allowed_nan_rows_read_as_nan_everywhere():
    alpha = np.array([[2.0, 1.0, 1.0], [np.inf, 1.0, 1.0], [np.nan, 1.0, 1.0]])
    table = PredictionTable.from_arrays(["a", "b", "c"], alpha=alpha, allow_nan=True)
    for slots in ("own", 2):
        reading = table.reading(slots)
        assert np.isfinite(reading.epistemic[0]) and np.isnan(reading.epistemic[1:]).all()
        assert np.isnan(reading.aleatoric[1:]).all() and np.isnan(reading.probs[1:]).all()
    assert table.select([1]).nan_rows.tolist() == [True]


def test_select_takes_rows_of_every_array():
    table = make_table("members")
    for indices in ([5, 0], np.arange(40) % 2 == 0, []):
        part = table.select(indices)
        chosen = np.arange(40)[np.asarray(indices, dtype=None if len(indices) else int)]
        assert part.ids.tolist() == [f"item-{row}" for row in chosen]
        np.testing.assert_array_equal(part.members, table.members[:, chosen])
        np.testing.assert_array_equal(part.labels, table.labels[chosen])
        assert len(part) == len(chosen) and part.alpha is None


@pytest.mark.parametrize("kind", ["probs", "alpha", "members"])
def test_round_trip_is_exact(tmp_path, kind):
    table = make_table(kind, meta={**META, "note": "ünï", "nested": {"a": (1, 2.5, None)}})
    path = tmp_path / "new" / "table.npz"
    table.save(path)
    assert_same(PredictionTable.load(path), table)
    assert os.listdir(path.parent) == ["table.npz"]
    with np.load(path, allow_pickle=False) as archive:
        assert all(archive[name].dtype != object for name in archive.files)


def test_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "table.npz"
    table = make_table()
    table.save(path)

    def fail(handle, **arrays):
        handle.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(UserError, match=r"Cannot write .*table\.npz: No space left"):
        make_table(seed=1).save(path)
    assert os.listdir(tmp_path) == ["table.npz"]
    assert_same(PredictionTable.load(path), table)


def test_truncated_or_damaged_files_are_user_errors(tmp_path):
    path = tmp_path / "table.npz"
    table = make_table("alpha")
    table.save(path)
    content = path.read_bytes()
    for size in range(0, len(content), 97):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match=r"table\.npz is not a readable prediction table"):
            PredictionTable.load(path)
    outcomes = set()
    for position in range(0, len(content), 41):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :])
        try:
            # Some bytes, such as time stamps, carry nothing; then the table must be intact.
            assert_same(PredictionTable.load(path), table)
            outcomes.add("intact")
        except UserError as error:
            assert "table.npz" in str(error)
            outcomes.add("refused")
    assert "refused" in outcomes


def test_foreign_files_are_user_errors(tmp_path):
    path = tmp_path / "table.npz"
    with pytest.raises(UserError, match="There is no prediction table"):
        PredictionTable.load(path)
    make_table().save(path)
    with np.load(path) as archive:
        arrays = dict(archive)

    def refused(message, **changes):
        with open(path, "wb") as handle:
            np.savez(handle, **{name: value for name, value in {**arrays, **changes}.items() if value is not None})
        with pytest.raises(UserError, match=rf"table\.npz .*{message}"):
            PredictionTable.load(path)

    refused("no array named probs, meta", probs=None, meta=None)
    refused("labels has shape", labels=arrays["labels"][:-1])
    refused("probs must be real", probs=arrays["probs"].astype(complex))
    refused("holds Python objects", ids=arrays["ids"].astype(object))
    refused("meta must be a JSON object", meta=np.array("[1]"))
    refused("Expecting value", meta=np.array("not json"))
    for content in (pickle.dumps({"ids": ["a"]}), b"", b"plain text"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"not a complete \.npz archive"):
            PredictionTable.load(path)


def test_nan_rows_need_permission_to_load(tmp_path):
    path = tmp_path / "table.npz"
    PredictionTable.from_arrays(["a"], alpha=np.array([[np.nan, 1.0]]), allow_nan=True).save(path)
    with pytest.raises(UserError, match=r"table\.npz .*1 of 1 rows hold NaN or Inf \(first: a\)"):
        PredictionTable.load(path)
    assert PredictionTable.load(path, allow_nan=True).nan_rows.all()


def test_parquet_holds_the_same_numbers(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = make_table("members")
    table.to_parquet(tmp_path / "table.parquet")
    read = parquet.read_table(tmp_path / "table.parquet")
    assert read.column_names == ["ids", "labels", "num_options", "probs", "aleatoric", "epistemic", "members"]
    assert read["ids"].to_pylist() == table.ids.tolist()
    np.testing.assert_array_equal(np.array(read["probs"].to_pylist(), dtype=np.float32), table.probs)
    members = np.array(read["members"].to_pylist(), dtype=np.float32)
    np.testing.assert_array_equal(members.transpose(1, 0, 2), table.members)
    assert b'"task": "toy"' in read.schema.metadata[b"meta"]


def test_evaluation_imports_without_torch():
    code = (
        "import sys; import dappr_llm.evaluation.prediction_table, dappr_llm.evaluation.classification_metrics, dappr_llm.evaluation.calibration_metrics, dappr_llm.evaluation.ranking_metrics, dappr_llm.evaluation.evaluators, dappr_llm.evaluation.reporting.figures, dappr_llm.evaluation.reporting.text_tables; "
        "print([n for n in ('torch', 'transformers', 'peft', 'datasets', 'matplotlib') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ids_have_a_stated_limit(tmp_path, monkeypatch):
    ids = [*(f"q{i}" for i in range(4)), "x" * 100_000]
    for given in (ids, np.array(ids)):
        with pytest.raises(
            UserError, match=r"row 4: the id 'xxxxxxxxxxxxxxxxxxxx'… has 100,000 characters; at most 1,000"
        ):
            PredictionTable.from_arrays(given, probs=np.full((5, 2), 0.5))
    with monkeypatch.context() as patch:
        patch.setattr("dappr_llm.core.names.ID_LIMIT", 10**6)
        patch.setattr("dappr_llm.core.archives.ID_LIMIT", 10**6)
        PredictionTable.from_arrays(ids, probs=np.full((5, 2), 0.5)).save(tmp_path / "t.npz")
    with pytest.raises(UserError, match=r"t.npz is not a readable prediction table: row 4: the id"):
        PredictionTable.load(tmp_path / "t.npz")


@pytest.mark.parametrize("meta", ["[" * 100_000, '{"a":' * 50_000, '{"a": 1, "a": 2}', "x" * 5_000_000, "[]", "NaN"])
def test_meta_data_that_are_huge_nested_or_no_object(tmp_path, meta):
    arrays = {name: np.zeros(1) for name in ("aleatoric", "epistemic")} | {"probs": np.full((1, 2), 0.5)}
    arrays |= {"ids": np.array(["a"]), "labels": np.array([0]), "num_options": np.array([2]), "meta": np.array(meta)}
    np.savez_compressed(tmp_path / "t.npz", **arrays)
    with pytest.raises(UserError, match="t.npz is not a readable prediction table") as error:
        PredictionTable.load(tmp_path / "t.npz")
    assert len(str(error.value)) < 400


def test_meta_data_are_plain_json():
    for value in (float("nan"), {1, 2}, object()):
        with pytest.raises(UserError, match="meta must be plain JSON"):
            PredictionTable.from_arrays(["a"], probs=np.full((1, 2), 0.5), meta={"x": value})


def optional_arrays(rows, width, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "logits": rng.normal(size=(rows, width)),
        "density": rng.normal(size=rows),
        "familiarity": rng.uniform(0.01, 1, rows),
        "lengths": rng.integers(0, 50, rows),
        "option_lengths": rng.integers(0, 50, rows),
    }


def with_optional(kind="alpha", rows=6, seed=0, **changes):
    table = make_table(kind, rows=rows)
    arrays = {name: getattr(table, name) for name in ("ids", "labels", "num_options", "probs", "alpha", "members")}
    return PredictionTable.from_arrays(
        **arrays, meta=table.meta, **{**optional_arrays(rows, table.width, seed), **changes}
    )


OPTIONAL = ("logits", "density", "familiarity", "lengths", "option_lengths")


def test_optional_arrays_are_saved_loaded_and_selected(tmp_path):
    table = with_optional(logits=np.where(np.arange(6) == 2, -np.inf, optional_arrays(6, 6)["logits"]))
    table.save(tmp_path / "table.npz")
    loaded = PredictionTable.load(tmp_path / "table.npz")
    assert_same(table, loaded)
    chosen = table.select([4, 1])
    for name in OPTIONAL:
        assert getattr(loaded, name).dtype == getattr(table, name).dtype
        np.testing.assert_array_equal(getattr(loaded, name), getattr(table, name))
        np.testing.assert_array_equal(getattr(chosen, name), getattr(table, name)[[4, 1]])
    assert loaded.lengths.dtype == np.int64 and loaded.logits.dtype == np.float32
    reading = loaded.reading(3)
    assert (reading.logits[:, 3:] == -np.inf).all() and (reading.logits[:, 2] == -np.inf).all()
    np.testing.assert_array_equal(reading.logits[:, :2], table.logits[:, :2])
    assert make_table().reading(3).logits is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": np.zeros((6, 5))}, "logits has shape"),
        ({"density": np.zeros(5)}, "density has shape"),
        ({"familiarity": np.zeros(6)}, "familiarity is not above 0"),
        ({"familiarity": np.full(6, 1.5)}, "familiarity is not above 0"),
        ({"lengths": np.full(6, -1)}, "lengths is negative"),
        ({"option_lengths": np.full(6, 1.5)}, "must be integers"),
        ({"density": np.array([0, 0, np.nan, 0, 0, 0])}, "1 of 6 rows hold NaN"),
        ({"logits": np.full((6, 6), np.inf)}, "6 of 6 rows hold NaN"),
    ],
)
def test_defects_of_optional_arrays_are_named(changes, message):
    with pytest.raises(UserError, match=message):
        with_optional(**changes)


def test_nan_in_an_optional_array_marks_the_row():
    arrays = optional_arrays(6, 6)
    table = make_table("alpha", rows=6)
    arrays["logits"][3, 1] = np.nan
    arrays["density"][1] = np.inf
    found = PredictionTable.from_arrays(table.ids, alpha=table.alpha, allow_nan=True, **arrays)
    assert found.nan_rows.tolist() == [False, True, False, True, False, False]
    assert np.isnan(found.reading("own").epistemic[[1, 3]]).all()


def test_ensembles_average_what_has_a_common_scale():
    tables = [with_optional(seed=seed) for seed in (1, 2)]
    found = combine(tables)
    for name in ("logits", "density"):
        mean = (getattr(tables[0], name) + getattr(tables[1], name)) / 2
        np.testing.assert_allclose(getattr(found, name), mean, atol=1e-6)
    # Twice the mean of dependent p-values is a p-value.
    np.testing.assert_allclose(
        found.familiarity, np.minimum(1, tables[0].familiarity + tables[1].familiarity), atol=1e-6
    )
    np.testing.assert_array_equal(found.lengths, tables[0].lengths)
    np.testing.assert_allclose(combine(tables[:1]).familiarity, tables[0].familiarity)

    other = with_optional(seed=2, density=None, lengths=None, option_lengths=None)
    other.meta["method"] = "another"
    mixed = combine([other, tables[0]])
    assert mixed.logits is None and mixed.density is None and mixed.familiarity is not None
    np.testing.assert_array_equal(mixed.option_lengths, tables[0].option_lengths)
