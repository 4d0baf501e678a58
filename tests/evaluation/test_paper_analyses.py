"""The paper's analyses, on tables whose figures are known."""

import numpy as np
import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.core.recipe import build_recipe
from dappr_llm.evaluation.paper_analyses import (
    falls,
    lambda_curves,
    normalised_evidence,
    plot_curves,
    plot_evidence,
    plot_reliabilities,
    render_shift,
    shift_table,
    size_curves,
)
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.evaluation.results import save_results
from dappr_llm.evaluation.runs import find_runs


def make(alpha, labels=None, **meta):
    meta = {"task": "t", "num_choices": 3, "task_num_choices": 3, "method": "dappr", **meta}
    return PredictionTable.from_arrays([str(i) for i in range(len(alpha))], labels, alpha=np.array(alpha), meta=meta)


SURE, UNSURE = [9.0, 1.0, 1.0], [2.0, 1.5, 1.0]


@pytest.fixture
def run(tmp_path):
    """Writes a run's folder and reads it again."""

    def write(tables, seed=0, size=None, row="r"):
        folder = tmp_path / str(len(list(tmp_path.iterdir()))) / row / f"seed{seed}"
        for task, table in tables.items():
            table.save(folder / "predictions" / f"{task}-test.npz")
        data = {"train": "digits", "max_train_samples": size}
        recipe = build_recipe({"data": data, "model": {"backbone": "convnet"}, "train": {"seed": seed}})
        (folder / "recipe.yaml").write_text(recipe.to_yaml())
        id_name, *ood = tables
        save_results({}, {"id": id_name, "ood": ood}, folder / "results.json")
        (found,) = find_runs(folder.parents[1])
        assert (found.row, found.seed, list(found.tables)) == (row, seed, list(tables))
        return found

    return write


def test_curves_over_lambda_and_size(run):
    clean = make([SURE, SURE], [0, 1], options={"reg_weight": 0.1})
    plain = make([SURE, SURE], [0, 0], options={"reg_weight": 0.1, "regulariser": "none"})
    curves = lambda_curves([run({"a": clean, "b": make([UNSURE])}), run({"a": plain, "b": make([SURE])}, seed=1)])
    assert list(curves["accuracy"]) == [0.0, 0.1]
    assert curves["accuracy"][0.1].mean == 0.5 and curves["accuracy"][0.0].mean == 1.0
    assert curves["OOD AUPR"][0.1].mean == 1.0
    sizes = size_curves([run({"a": make([UNSURE])}, size=10), run({"a": make([SURE])}, size=100)])
    assert sizes["dappr"][10.0].mean == pytest.approx(3 / 4.5) and falls(sizes["dappr"])
    assert not falls(dict(reversed([(1.0, sizes["dappr"][10.0]), (0.5, sizes["dappr"][100.0])])))
    with pytest.raises(UserError, match="max_train_samples"):
        size_curves([run({"a": make([SURE])})])


def test_evidence_is_normalised_over_all_tables_together():
    found = normalised_evidence({"id": make([SURE, [4.0, 2.0, 1.0]]), "ood": make([[1.0, 1.0, 1.0]])})
    np.testing.assert_allclose(found["id"], [1.0, 0.5])
    np.testing.assert_allclose(found["ood"], [0.0])
    with pytest.raises(UserError, match="no alpha"):
        normalised_evidence({"x": PredictionTable.from_arrays(["a"], probs=np.array([[0.5, 0.5]]))})


def test_shift_is_averaged_over_corruptions_by_severity():
    clean = make([SURE, SURE], [0, 0])
    tables = {
        "cifar10_c_fog_1": make([SURE, SURE], [0, 0]),
        "cifar10_c_snow_1": make([UNSURE, UNSURE], [0, 1]),
        "cifar10_c_fog_5": make([UNSURE, UNSURE], [1, 1]),
    }
    found = shift_table(clean, tables)
    assert found[1]["corruptions"] == 2 and found[1]["accuracy"] == 0.75 and found[5]["accuracy"] == 0.0
    assert found[5]["aupr"] == 1.0 and found[1]["aupr"] == pytest.approx((0.5 + 1.0) / 2)
    assert "| dappr | 75.00 | 100.00 |" in render_shift({"dappr": found})
    with pytest.raises(UserError, match="severity"):
        shift_table(clean, {"fog": clean})


def test_figures_are_drawn(tmp_path, run):
    pytest.importorskip("matplotlib")
    tables = {"id": make([SURE, UNSURE], [0, 1]), "ood": make([UNSURE, SURE])}
    curve = size_curves([run({"a": make([UNSURE])}, size=10), run({"a": make([SURE])}, size=100)])
    plot_curves(curve, tmp_path / "a.png", "x", "y")
    plot_evidence({"one": tables, "two": tables}, tmp_path / "b.png")
    plot_reliabilities({"dappr": [tables["id"]]}, tmp_path / "c.png")
    assert all((tmp_path / f"{name}.png").read_bytes()[1:4] == b"PNG" for name in "abc")
